"""All documents of a source's local files as one random-access sequence."""

import glob
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from titan_relay.config.errors import Refusal, either
from titan_relay.config.suggest import nearest
from titan_relay.data.documents import BadDocument, DataError, Document, DocumentFile, Row
from titan_relay.data.parquet_files import ParquetFiles
from titan_relay.data.text_files import (
    JsonLinesFile,
    JsonListFile,
    OpenFiles,
    PlainTextFiles,
    starts_with_list,
)

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
_FINGERPRINT_BYTES = 1 << 16


def expand_files(patterns: Sequence[str], key: str = "data.files") -> list[Path]:
    """The files that the paths and globs name, sorted within each glob, each once.

    `key` names the configuration key in messages.

    Raises DataError for a pattern that matches nothing, a folder, or an unknown suffix.
    """
    found: dict[Path, None] = {}
    for _, fix, value in check_files(key, patterns):
        raise DataError(f'{key}: "{value}": {fix}')
    for pattern in patterns:
        files = _files_of(pattern)
        for path in files:
            if path in found and files == [Path(pattern)]:
                logger.warning("%s: %s is named more than once; it is read once", key, path)
            found[path] = None
    return list(found)


def check_files(key: str, patterns: Sequence[str]) -> Iterator[Refusal]:
    """Yield a `Refusal` of `key` for a path or glob without files, and for files of other kinds."""
    for pattern in patterns:
        files = _files_of(pattern)
        if not files:
            yield Refusal(key, _why_nothing(pattern), pattern)
        for path in files:
            if path.suffix not in SUFFIXES:
                yield Refusal(key, f"must end in {either(SUFFIXES)}", str(path))


def _files_of(pattern: str) -> list[Path]:
    matches = sorted(glob.glob(pattern, recursive=True)) or [pattern]
    return [Path(match) for match in matches if Path(match).is_file()]


def _why_nothing(pattern: str) -> str:
    if Path(pattern).is_dir():
        return f'is a folder; name its files, such as "{pattern.rstrip("/")}/*.jsonl"'
    if any(mark in pattern for mark in "*?["):
        return f"matches no file (from the folder {Path.cwd()})"
    return f"no such file{similar(Path(pattern))}"


def similar(path: Path) -> str:
    """What else may be meant by a path that is not there, as the end of a message."""
    if "demo_data" in path.parts:
        return "; `make demo-data` writes it"
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent} in {Path.cwd()}"
    close = nearest(path.name, [each.name for each in path.parent.iterdir()])
    return f"; did you mean {path.parent / close}?" if close else f" in {path.parent.resolve()}"


class LocalDocuments:
    """Documents 0..n-1 of local files: file by file in the order given, .parquet and .txt last.

    `fingerprint` covers names, sizes, and both ends of every file, not folders or dates: a corpus
    that was copied elsewhere is still the same corpus.
    """

    def __init__(self, name: str, patterns: Sequence[str], text_column: str, key: str) -> None:
        self.name = name
        self._open_files = OpenFiles()
        paths = expand_files(patterns, key)
        self._parts = self._open(paths, text_column)
        self._ends = np.cumsum([len(part) for part in self._parts])
        if not len(self):
            raise DataError(f"{key}: no documents in {', '.join(map(str, paths[:5]))}")
        self.fingerprint = _fingerprint(paths, text_column)
        logger.info("source %s: %d documents in %d file(s)", name, len(self), len(paths))

    def _open(self, paths: list[Path], text_column: str) -> list[DocumentFile]:
        parts: list[DocumentFile] = []
        for path in paths:
            if path.suffix == ".json" and starts_with_list(path):
                parts.append(JsonListFile(path, text_column))
            elif path.suffix in (".json", ".jsonl"):
                parts.append(JsonLinesFile(path, text_column, self._open_files))
        if parquet := [path for path in paths if path.suffix == ".parquet"]:
            parts.append(ParquetFiles(parquet, text_column))
        if text := [path for path in paths if path.suffix == ".txt"]:
            parts.append(PlainTextFiles(text))
        return parts

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Row:
        part = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[part - 1]) if part else 0
        return self._parts[part].read(index - first)

    def require_usable(self, num_tokens: Callable[[str], int]) -> None:
        """Raises DataError unless some document gives something to predict.

        Reads in file order up to the first such document (normally one read), the same on every
        rank, so that a corpus of nothing but bad rows ends the run at once instead of spinning.
        """
        first_bad: BadDocument | None = None
        for index in range(len(self)):
            row = self.read(index)
            if isinstance(row, Document):
                if num_tokens(row.text) > 1:
                    return
                row = BadDocument(row.where, "the text is a single token")
            if first_bad is None or (first_bad.blank_line and not row.blank_line):
                first_bad = row
        assert first_bad is not None
        raise DataError(
            f"source {self.name}: none of its {len(self)} documents is usable; "
            f"the first: {first_bad.where}: {first_bad.reason}"
        )

    def close(self) -> None:
        self._open_files.close()


def _fingerprint(paths: list[Path], text_column: str) -> str:
    digest = hashlib.sha256(text_column.encode())
    for path in paths:
        num_bytes = path.stat().st_size
        digest.update(json.dumps([path.name, num_bytes]).encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_FINGERPRINT_BYTES))
            stream.seek(max(0, num_bytes - _FINGERPRINT_BYTES))
            digest.update(stream.read(_FINGERPRINT_BYTES))
    return digest.hexdigest()[:16]
