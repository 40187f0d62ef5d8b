"""Plain-text files (one document each), JSON Lines and JSON lists, read by position.

JSON Lines files are indexed once by the offsets of their lines (8 bytes a line) and then read
one line at a time, so that opening, shuffling, and skipping cost nothing in proportion to the
text. The JSON reader of `datasets` is not used: one malformed row makes it refuse a whole block
without naming the row.
"""

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from titan_relay.data.documents import (
    BadDocument,
    DataError,
    Row,
    check_row,
    check_text,
    decode_utf8,
)

_INDEX_BLOCK_BYTES = 1 << 24
_MAX_OPEN_FILES = 64


class OpenFiles:
    """At most 64 open descriptors, the least recently used closed first.

    Corpora come in thousands of files, and opening one on a network file system for every
    document is slow.
    """

    def __init__(self) -> None:
        self._descriptors: OrderedDict[Path, int] = OrderedDict()

    def read(self, path: Path, start: int, num_bytes: int) -> bytes:
        descriptor = self._descriptors.pop(path, None)
        if descriptor is None:
            descriptor = os.open(path, os.O_RDONLY)
        self._descriptors[path] = descriptor
        if len(self._descriptors) > _MAX_OPEN_FILES:
            os.close(self._descriptors.popitem(last=False)[1])
        return os.pread(descriptor, num_bytes, start)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class JsonLinesFile:
    """One JSON object per line. Rows are numbered from 1 in messages, as editors do."""

    def __init__(self, path: Path, text_column: str, open_files: OpenFiles) -> None:
        self._path, self._text_column, self._open_files = path, text_column, open_files
        self._starts = _line_starts(path)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, index: int) -> Row:
        where = f"{self._path}, line {index + 1}"
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        text = decode_utf8(self._open_files.read(self._path, start, end - start), where)
        if isinstance(text, BadDocument):
            return text
        if not text.strip():
            return BadDocument(where, "blank line", blank_line=True)
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            return BadDocument(where, f"not valid JSON: {error}")
        return check_row(row, self._text_column, where)


def _line_starts(path: Path) -> np.ndarray:
    """int64 [num_lines + 1]: where each line begins, and the end of the file."""
    starts = [np.zeros(1, dtype=np.int64)]
    position = 0
    with path.open("rb") as stream:
        while block := stream.read(_INDEX_BLOCK_BYTES):
            newlines = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
            starts.append(newlines.astype(np.int64) + position + 1)
            position += len(block)
    offsets = np.concatenate(starts)
    if offsets[-1] != position:  # the last line has no newline
        offsets = np.append(offsets, np.int64(position))
    return offsets


class JsonListFile:
    """One JSON list of objects, held in memory."""

    def __init__(self, path: Path, text_column: str) -> None:
        text = decode_utf8(path.read_bytes(), str(path))
        if isinstance(text, BadDocument):
            raise DataError(f"{path}: {text.reason}")
        try:
            rows: list[Any] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not valid JSON: {error}") from error
        self._rows = [
            check_row(row, text_column, f"{path}, row {number}")
            for number, row in enumerate(rows, start=1)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Row:
        return self._rows[index]


class PlainTextFiles:
    """Each file is one document."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int) -> Row:
        where = str(self._paths[index])
        text = decode_utf8(self._paths[index].read_bytes(), where)
        return text if isinstance(text, BadDocument) else check_text(text, where)


def starts_with_list(path: Path) -> bool:
    """Whether a .json file holds a list; otherwise it is read as JSON Lines, as hubs name them."""
    with path.open("rb") as stream:
        while block := stream.read(4096):
            head = block.removeprefix(b"\xef\xbb\xbf").lstrip()
            if head:
                return head[:1] == b"["
    return False
