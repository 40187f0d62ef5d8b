"""The files that a tokenizer is made of: tiktoken rank files, and what a model's folder says.

A rank file has one token per line as ``base64(bytes) rank``. `tiktoken.load` is not used: it keeps
a copy in a temporary folder under a hash of the *path*, so a tokenizer trained again to the same
path would be read back in its old form.

Hugging Face folders have `tokenizer.json`, or, for some models, the rank file of a tiktoken
vocabulary; `tokenizer_config.json` beside it names special tokens.
"""

import base64
import binascii
import json
import os
from pathlib import Path
from typing import Any

from titan_relay.config.schema_data import TokenizerConfig
from titan_relay.data.documents import DataError
from titan_relay.data.local_files import similar

_CONFIG = "tokenizer_config.json"
# A file named tokenizer.model is a rank file in some models and of another kind in most.
_RANK_FILES = ("*.tiktoken", "tiktoken.model", "tokenizer.model")


def read_rank_file(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank. Raises DataError naming file and line where the file is malformed."""
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f'{path}, line {number}: {line[:60]!r} is not "base64-token rank"; '
                "tokenizer.path must be a tiktoken rank file"
            ) from error
        if token in ranks or rank in taken or rank < 0:
            raise DataError(
                f"{path}, line {number}: token {token!r} or rank {rank} occurs twice or is negative"
            )
        ranks[token] = rank
        taken.add(rank)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of the 256 single bytes have no rank (first: {missing[0]}), "
            "so some text could not be encoded; use a byte-level rank file"
        )
    return ranks


def write_rank_file(path: Path, ranks: dict[bytes, int]) -> None:
    """Writes `ranks` in rank order; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        f"{base64.b64encode(token).decode()} {rank}\n"
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    )
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(lines), encoding="ascii")
    os.replace(partial, path)


def tokenizer_file(config: TokenizerConfig) -> Path:
    """The file to read: the one that is named, or that of a folder.

    Raises DataError, which says what is wrong with `tokenizer.path`, where there is none.
    """
    path = Path(config.path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"no such file or folder{similar(path)}")
    if config.kind == "tiktoken":
        return _rank_file_of(path)
    names = sorted(entry.name for entry in path.iterdir())
    if "tokenizer.json" not in names:
        raise DataError(f"has no tokenizer.json; it has: {', '.join(names[:10]) or 'nothing'}")
    return path / "tokenizer.json"


def _rank_file_of(folder: Path) -> Path:
    for pattern in _RANK_FILES:
        found = sorted(each for each in folder.glob(pattern) if each.is_file())
        if len(found) > 1:
            names = " and ".join(each.name for each in found)
            raise DataError(f"has {names}; name one of the files")
        if found:
            return found[0]
    raise DataError('has no tiktoken rank file; name one, or use kind = "huggingface"')


def named_boundaries(folder: Path) -> tuple[str | None, str | None]:
    """The BOS and EOS tokens that the folder names."""
    content = _read_config(folder)

    def named(key: str) -> str | None:
        value = content.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        return text if isinstance(text, str) and text else None  # some files say null or false

    return named("bos_token"), named("eos_token")


def named_specials(folder: Path) -> dict[str, int]:
    """The special tokens that the folder lists, with their ids."""
    listed = _read_config(folder).get("added_tokens_decoder", {})
    try:
        return {entry["content"]: int(token_id) for token_id, entry in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f'{folder / _CONFIG}: added_tokens_decoder is not {{"id": {{"content": "token"}}, ...}}'
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    return content
