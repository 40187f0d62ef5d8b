"""Trains a byte-level BPE on text files and writes it as a tiktoken rank file.

    python scripts/train_tokenizer.py --files outputs/corpus/train.jsonl \\
        --out outputs/tokenizer.tiktoken --vocab-size 4096

The special tokens (default ``<|endoftext|>``) take the last ids of the vocabulary and are part of
``--vocab-size``; the lines for ``[tokenizer]`` are printed at the end. Every single byte has an
id, so any text can be encoded.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_relay.config.schema_data import TokenizerConfig
from titan_relay.data.documents import DataError, Document
from titan_relay.data.local_files import LocalDocuments
from titan_relay.data.splitting import DEFAULT_PATTERN, cut_long_runs, resolve_pattern
from titan_relay.data.statistics import corpus_statistics
from titan_relay.data.tokenizer import load_tokenizer
from titan_relay.data.tokenizer_files import write_rank_file

NUM_BYTES = 256
_PROGRESS_SECONDS = 2.0


def read_texts(documents: LocalDocuments, label: str) -> Iterator[str]:
    """The usable texts; prints progress with the time left every two seconds."""
    started = last = time.monotonic()
    for index in range(len(documents)):
        row = documents.read(index)
        if isinstance(row, Document):
            yield row.text
        now = time.monotonic()
        if now - last >= _PROGRESS_SECONDS:
            last = now
            left = (now - started) / (index + 1) * (len(documents) - index - 1)
            print(f"{label}: document {index + 1} of {len(documents)}, about {left:.0f} s left")


def train_bpe(texts: Iterator[str], num_ranks: int, pattern: str) -> tuple[dict[bytes, int], Any]:
    """Token bytes -> rank (bytes first, then merges in order), and the trained tokenizer.

    `pattern` splits text before merging; no merge crosses a split.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    try:
        expression = Regex(pattern)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"--pattern {pattern!r} is not a valid expression: {error}") from error
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(expression, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=num_ranks,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
    )
    trained.train_from_iterator((piece for text in texts for piece in cut_long_runs(text)), trainer)
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    ranks = {
        bytes(byte_of[letter] for letter in token): rank
        for token, rank in trained.get_vocab().items()
    }
    return ranks, trained


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte 0..255.

    Bytes that print as one visible Latin-1 letter stand for themselves; the others, in order,
    take the code points from 256 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(NUM_BYTES)]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level BPE; write tiktoken ranks.")
    parser.add_argument(
        "--files", nargs="+", required=True, help="files or globs (.jsonl .json .parquet .txt)"
    )
    parser.add_argument("--text-column", default="text", help="column that holds the text")
    parser.add_argument("--out", type=Path, required=True, help="rank file to write")
    parser.add_argument(
        "--vocab-size", type=int, default=4096, help="number of ids, special tokens included"
    )
    parser.add_argument(
        "--pattern", default=DEFAULT_PATTERN, help="name of a split pattern, or an expression"
    )
    parser.add_argument(
        "--special-tokens", nargs="*", default=["<|endoftext|>"], help="they take the last ids"
    )
    parser.add_argument("--report", type=Path, help="write the corpus statistics as JSON here")
    options = parser.parse_args(arguments)
    smallest = NUM_BYTES + len(options.special_tokens)
    if options.vocab_size < smallest:
        parser.error(
            f"--vocab-size {options.vocab_size} must be at least {smallest}: "
            "256 bytes and the special tokens"
        )
    if len(set(options.special_tokens)) != len(options.special_tokens):
        parser.error(f"--special-tokens {' '.join(options.special_tokens)}: one is named twice")
    return options


def train(options: argparse.Namespace) -> None:
    """Trains, writes the rank file and the report, and prints what came out."""
    started = time.monotonic()
    documents = LocalDocuments("corpus", options.files, options.text_column, "--files")
    documents.require_usable(len)
    num_ranks = options.vocab_size - len(options.special_tokens)
    ranks, _ = train_bpe(
        read_texts(documents, "reading"), num_ranks, resolve_pattern(options.pattern)
    )
    if len(ranks) < num_ranks:
        raise DataError(
            f"--vocab-size {options.vocab_size} is too large for this text: it gives only "
            f"{len(ranks) + len(options.special_tokens)} ids; ask for fewer or add --files"
        )
    write_rank_file(options.out, ranks)
    print(f"trained {len(ranks)} ranks in {time.monotonic() - started:.1f} s -> {options.out}")
    special_ids = {token: num_ranks + i for i, token in enumerate(options.special_tokens)}
    eos = options.special_tokens[0] if options.special_tokens else None
    config = TokenizerConfig(
        path=str(options.out),
        pattern=options.pattern,
        special_tokens=special_ids,
        eos_token=eos,
        add_eos=eos is not None,
    )
    statistics = corpus_statistics(read_texts(documents, "encoding"), load_tokenizer(config))
    print(
        f"{statistics.num_tokens} tokens in {statistics.num_documents} documents, "
        f"{statistics.bytes_per_token:.3f} bytes per token, "
        f"unigram entropy {statistics.unigram_entropy_nats:.4f} nats per token"
    )
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(statistics.to_dict(), indent=2) + "\n")
    print_section(config)


def print_section(config: TokenizerConfig) -> None:
    """Prints the `[tokenizer]` section that uses what was written."""
    tokens = ", ".join(f"{json.dumps(k)} = {v}" for k, v in config.special_tokens.items())
    print(f'[tokenizer]\nkind = "tiktoken"\npath = {json.dumps(config.path)}')
    print(f"pattern = {json.dumps(config.pattern)}\nspecial_tokens = {{ {tokens} }}")
    print(f"add_eos = {str(config.add_eos).lower()}")
    if config.eos_token:
        print(f"eos_token = {json.dumps(config.eos_token)}")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse_arguments(arguments)
    try:
        train(options)
    except (DataError, OSError) as error:
        print(f"train_tokenizer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
