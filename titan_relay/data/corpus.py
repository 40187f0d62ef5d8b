"""A real text corpus without a download: the source files of a folder of Python.

Test suites, installed packages, duplicates, generated tables, and files that cannot be decoded are
left out. A file is in the validation part if a hash of its path says so, so the split is the same
on every machine and a file is never in both parts.
"""

import hashlib
import json
import os
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
MAX_FILE_BYTES = 300_000  # larger ones are tables: encodings, Unicode names, HTML entities
HASH_RANGE = 1 << 32


@dataclass
class Corpus:
    """The files of both parts, and how many were left out for which reason."""

    train: list[tuple[str, str]] = field(default_factory=list)
    validation: list[tuple[str, str]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def path_hash(path: str) -> int:
    """A number in 0..2**32-1 that depends on the text of `path` only."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big")


def source_files(root: Path) -> Iterator[str]:
    """Paths of the Python files under `root`, relative to it, without the skipped folders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def read_source(path: Path) -> str | None:
    """The text of a Python file in its declared encoding; None if it cannot be read."""
    try:
        with tokenize.open(path) as stream:
            text = stream.read()
        text.encode("utf-8")
    except (OSError, SyntaxError, UnicodeError):
        return None
    return text


def collect(root: Path, max_bytes: int | None, validation_share: float) -> Corpus:
    """Reads the corpus under `root`.

    Files are taken in hash order until `max_bytes` of text are reached, so that a small corpus is
    a mixture of the whole library too; each part is then sorted by path.
    """
    corpus, seen, num_bytes = Corpus(), set[bytes](), 0
    for name in sorted(source_files(root), key=path_hash):
        path = root / name
        if path.stat().st_size > MAX_FILE_BYTES:
            corpus.left_out["larger than 300 kB"] += 1
            continue
        text = read_source(path)
        content = (text or "").encode()
        digest = hashlib.sha256(content).digest()
        if text is None:
            corpus.left_out["unreadable"] += 1
        elif not text.strip():
            corpus.left_out["empty"] += 1
        elif digest in seen:
            corpus.left_out["duplicate"] += 1
        elif max_bytes is not None and num_bytes + len(content) > max_bytes:
            corpus.left_out["beyond --max-bytes"] += 1
        else:
            seen.add(digest)
            num_bytes += len(content)
            # Independent of the order in which files are taken.
            held_out = path_hash("validation/" + name) < validation_share * HASH_RANGE
            (corpus.validation if held_out else corpus.train).append((name, text))
    corpus.train.sort()
    corpus.validation.sort()
    return corpus


def write_part(path: Path, documents: list[tuple[str, str]]) -> int:
    """Writes one part, whole or not at all; returns its size in bytes."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as stream:
        for name, text in documents:
            stream.write(json.dumps({"text": text, "path": name}, ensure_ascii=False) + "\n")
    os.replace(partial, path)
    return path.stat().st_size
