"""Reads and writes tiktoken rank files: one token per line as ``base64(bytes) rank``.

`tiktoken.load` is not used: it keeps a copy in a temporary folder under a hash of the *path*,
so a tokenizer trained again to the same path would be read back in its old form.
"""

import base64
import binascii
import os
from pathlib import Path

from titan_relay.data.errors import DataError


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
