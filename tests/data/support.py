"""Small corpora, tokenizers, and readers that the data tests share."""

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titan_relay.config.schema_data import DataConfig, TokenizerConfig
from titan_relay.data import IGNORE_INDEX, LaneReader, PackedRow, Tokenizer, load_tokenizer

EOS = 256


def write_byte_ranks(path: Path, merges: Sequence[bytes] = ()) -> Path:
    """A rank file of the 256 bytes and `merges`: ids are readable as bytes."""
    tokens = [bytes([byte]) for byte in range(256)] + list(merges)
    path.write_text(
        "".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens))
    )
    return path


def byte_tokenizer(folder: Path, **options: Any) -> Tokenizer:
    """One id for each byte, then EOS = 256."""
    path = write_byte_ranks(folder / "bytes.tiktoken")
    settings: dict[str, Any] = {
        "special_tokens": {"<|endoftext|>": EOS},
        "eos_token": "<|endoftext|>",
        **options,
    }
    return load_tokenizer(TokenizerConfig(path=str(path), **settings))


def write_jsonl(path: Path, texts: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def numbered_texts(count: int) -> list[str]:
    """Documents of 8 to 60 bytes that name themselves: ``<7>....`` ."""
    return [f"<{number}>" + "." * (5 + (number * 17) % 50) for number in range(count)]


def read_numbers(rows: Sequence[PackedRow]) -> list[int]:
    """The numbers of the documents that begin in `rows` of one lane, in order.

    Rows of one lane must be given one after the other: a name may be cut by a row's end.
    """
    text = "".join(
        chr(token)
        for row in rows
        for token, label in zip(row["input"], row["labels"], strict=True)
        if label != IGNORE_INDEX
    )
    return [int(part.split(">")[0]) for part in text.split("<")[1:] if ">" in part]


def open_reader(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    lanes: range | None = None,
    num_lanes: int = 4,
    seq_len: int = 16,
    seed: int = 1,
    **sizes: Any,
) -> LaneReader:
    return LaneReader(
        config,
        tokenizer,
        seq_len=seq_len,
        num_lanes=num_lanes,
        lanes=range(num_lanes) if lanes is None else lanes,
        seed=seed,
        **sizes,
    )


def equal_rows(left: PackedRow, right: PackedRow) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)
