"""Trains a byte-level BPE, as a tiktoken rank file holds it: every single byte has an id."""

from collections.abc import Iterator
from typing import Any

from titan_relay.data.documents import DataError
from titan_relay.data.splitting import cut_long_runs

NUM_BYTES = 256
_LONGEST_RUN_CHARS = 20_000  # every merge goes through each word that has it, however long


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
    pieces = (piece for text in texts for piece in cut_long_runs(text, _LONGEST_RUN_CHARS))
    trained.train_from_iterator(pieces, trainer)
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
