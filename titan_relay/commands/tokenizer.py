"""Trains a byte-level BPE on text files and writes it as a tiktoken rank file.

    titan-relay tokenizer --files outputs/corpus/train.jsonl \\
        --out outputs/tokenizer.tiktoken --vocab-size 4096

The special tokens (default ``<|endoftext|>``) take the last ids of the vocabulary and are part of
``--vocab-size``; the lines for ``[tokenizer]`` are printed at the end. Every single byte has an
id, so any text can be encoded.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from titan_relay.commands import arguments as arg
from titan_relay.config import ConfigError
from titan_relay.config.schema_data import TokenizerConfig
from titan_relay.config.toml import dump_tables
from titan_relay.data import load_tokenizer
from titan_relay.data.bpe import NUM_BYTES, train_bpe
from titan_relay.data.documents import Document
from titan_relay.data.local_files import LocalDocuments
from titan_relay.data.splitting import DEFAULT_PATTERN, resolve_pattern
from titan_relay.data.statistics import corpus_statistics
from titan_relay.data.tokenizer_files import write_rank_file

_SECONDS_BETWEEN_LINES = 2.0
_MOST_IDS = 2**24  # the trainer reserves memory for all of them at once


def main(arguments: Sequence[str]) -> int:
    args = _parse(arguments)
    documents = LocalDocuments("corpus", args.files, args.text_column, "--files")
    documents.require_usable(len)
    config = _train(args, documents)
    statistics = corpus_statistics(_texts(documents, "encoding"), load_tokenizer(config))
    print(
        f"{statistics.num_tokens} tokens in {statistics.num_documents} documents, "
        f"{statistics.bytes_per_token:.3f} bytes per token, "
        f"unigram entropy {statistics.unigram_entropy_nats:.4f} nats per token"
    )
    if args.report:
        arg.write_json(args.report, asdict(statistics))
    _print_section(config)
    return 0


def parser() -> arg.CommandParser:
    """The command's options."""
    parser = arg.command_parser("tokenizer", __doc__)
    parser.add_argument(
        "--files", nargs="+", type=arg.path_text, required=True,
        help="files or globs (.jsonl .json .parquet .txt)",
    )  # fmt: skip
    parser.add_argument(
        "--text-column", type=arg.not_empty, default="text", help="column that holds the text"
    )
    parser.add_argument("--out", type=arg.file_to_write, required=True, help="rank file to write")
    parser.add_argument(
        "--vocab-size", type=arg.at_least_1, default=4096,
        help="number of ids, special tokens included (default 4096)",
    )  # fmt: skip
    parser.add_argument(
        "--pattern", type=arg.not_empty, default=DEFAULT_PATTERN,
        help="name of a split pattern, or an expression",
    )  # fmt: skip
    parser.add_argument(
        "--special-tokens", nargs="*", type=arg.not_empty, default=["<|endoftext|>"],
        help="they take the last ids",
    )  # fmt: skip
    parser.add_argument(
        "--report", type=arg.file_to_write, help="write the corpus statistics as JSON"
    )
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    args = arg.parse(parser(), arguments)
    smallest = NUM_BYTES + len(args.special_tokens)
    if args.vocab_size < smallest:
        raise ConfigError(
            f"--vocab-size {args.vocab_size}: must be at least {smallest}: "
            "256 bytes and the special tokens"
        )
    if args.vocab_size > _MOST_IDS:
        raise ConfigError(f"--vocab-size {args.vocab_size}: must be at most {_MOST_IDS}")
    if len(set(args.special_tokens)) != len(args.special_tokens):
        raise ConfigError(f"--special-tokens {' '.join(args.special_tokens)}: one is named twice")
    return args


def _train(args: argparse.Namespace, documents: LocalDocuments) -> TokenizerConfig:
    """Train and write the rank file; returns the section that uses it."""
    started = time.monotonic()
    num_ranks = args.vocab_size - len(args.special_tokens)
    ranks, _ = train_bpe(_texts(documents, "reading"), num_ranks, resolve_pattern(args.pattern))
    if len(ranks) < num_ranks:
        raise ConfigError(
            f"--vocab-size {args.vocab_size}: is too large for this text, which gives only "
            f"{len(ranks) + len(args.special_tokens)} ids; ask for fewer or add --files"
        )
    write_rank_file(args.out, ranks)
    print(f"trained {len(ranks)} ranks in {time.monotonic() - started:.1f} s -> {args.out}")
    eos = args.special_tokens[0] if args.special_tokens else None
    return TokenizerConfig(
        path=str(args.out),
        pattern=args.pattern,
        special_tokens={token: num_ranks + i for i, token in enumerate(args.special_tokens)},
        eos_token=eos,
        add_eos=eos is not None,
    )


def _texts(documents: LocalDocuments, label: str) -> Iterator[str]:
    """The usable texts; prints progress with the time left every two seconds."""
    started = last = time.monotonic()
    for index in range(len(documents)):
        row = documents.read(index)
        if isinstance(row, Document):
            yield row.text
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            left = (now - started) / (index + 1) * (len(documents) - index - 1)
            print(f"{label}: document {index + 1} of {len(documents)}, about {left:.0f} s left")


def _print_section(config: TokenizerConfig) -> None:
    """Print the `[tokenizer]` section that uses what was written."""
    names = ("kind", "path", "pattern", "special_tokens", "add_eos", "eos_token")
    section = {name: getattr(config, name) for name in names}
    given = {name: value for name, value in section.items() if value not in (None, "")}
    print(dump_tables({"tokenizer": given}), end="")
