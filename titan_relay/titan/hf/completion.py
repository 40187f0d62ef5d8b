"""The mark of a checkpoint that was written to its end: its files, their sizes and checksums.

Saving writes into `step-N.saving`, the mark last, and then names the folder `step-N`: so the
checkpoint is there at once, and with all its files. Sizes are compared wherever a checkpoint is
looked at, the checksums (CRC-32, some gigabytes a second) when it is loaded. They find what disks
and copies do to files, not what somebody does who means to: he could write a mark too.

A checkpoint that was written before there were marks has none, and is taken as it is.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titan_relay.titan.hf.errors import HfError

MARK = "complete.json"
SAVING = ".saving"  # ends the name of a folder that is being written
_FORMAT = 1
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class FileMark:
    """Size and CRC-32 of a file."""

    size_bytes: int
    crc32: int


def file_mark(path: Path) -> FileMark:
    """Of a file as it is; reads all of it."""
    size_bytes = crc32 = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size_bytes, crc32 = size_bytes + len(block), zlib.crc32(block, crc32)
    return FileMark(size_bytes, crc32)


def files_of(checkpoint: Path) -> list[Path]:
    """All files of a folder but its mark, folders inside it included; sorted."""
    files = (path for path in checkpoint.rglob("*") if path.is_file())
    return sorted(path for path in files if path != checkpoint / MARK)


def write_mark(checkpoint: Path, step: int, files: Mapping[str, FileMark]) -> None:
    """Write the mark of a folder that is otherwise on disk; on disk itself when this returns.

    Args:
        files: by their path inside the folder.
    """
    content = {
        "format": _FORMAT,
        "step": step,
        "files": {name: asdict(files[name]) for name in sorted(files)},
    }
    with (checkpoint / MARK).open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(checkpoint)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_mark(checkpoint: Path) -> dict[str, FileMark] | None:
    """Marks of the files by their path inside the folder; None where there is no mark.

    Raises:
        HfError: what stands there is no mark.
    """
    mark = _step_and_files(checkpoint)
    return None if mark is None else mark[1]


def marked_step(checkpoint: Path) -> int | None:
    """The step that the checkpoint was made at; None where there is no mark. Raises as above."""
    mark = _step_and_files(checkpoint)
    return None if mark is None else mark[0]


def _step_and_files(checkpoint: Path) -> tuple[int, dict[str, FileMark]] | None:
    try:
        content = json.loads((checkpoint / MARK).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise HfError(
                f"{checkpoint / MARK} is of format {content['format']}, written by a newer "
                f"version; this one reads format {_FORMAT}"
            )
        files = {str(name): FileMark(**each) for name, each in content["files"].items()}
        return int(content["step"]), files
    except FileNotFoundError:
        return None
    except HfError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        kind = type(error).__name__
        raise HfError(f"{checkpoint} is damaged: {MARK} cannot be read ({kind})") from error


def check_sizes(checkpoint: Path) -> None:
    """Look at the sizes of the marked files, without reading them.

    Raises:
        HfError: the first that is missing or has another size.
    """
    for name, mark in (read_mark(checkpoint) or {}).items():
        try:
            size_bytes = (checkpoint / name).stat().st_size
        except OSError as error:
            raise HfError(missing(checkpoint, name)) from error
        if size_bytes != mark.size_bytes:
            how = "cut short" if size_bytes < mark.size_bytes else "too long"
            raise HfError(
                f"{checkpoint} is damaged: {name} is {how}, {size_bytes} bytes of {mark.size_bytes}"
            )


def missing(checkpoint: Path, name: str) -> str:
    """What is said of a file that is not there."""
    return (
        f"{checkpoint} is damaged: {name} is missing; if nodes had a folder each, it lies on "
        "another's disk"
    )


def check_mark_is_there(checkpoint: Path, storage_meta: Any) -> None:
    """Tell a checkpoint that lost its mark from one that never had one, by its metadata.

    Raises:
        HfError: it lost its mark.
    """
    was_marked = str(storage_meta.checkpoint_id).endswith(SAVING)
    if was_marked and not (checkpoint / MARK).is_file():
        raise HfError(missing(checkpoint, MARK))


def share_of(files: Mapping[str, FileMark], rank: int, world_size: int) -> list[str]:
    """The files that a rank reads when all ranks look through a checkpoint: about as many bytes."""
    by_size = sorted(files, key=lambda name: (files[name].size_bytes, name))
    return by_size[rank::world_size]


def first_damage(
    checkpoint: Path, files: Mapping[str, FileMark], names: Iterable[str]
) -> str | None:
    """The first of the named files that is not as it was written, in words; reads them."""
    for name in names:
        try:
            if file_mark(checkpoint / name) != files[name]:
                return f"{checkpoint} is damaged: {name} is not what was written (checksum)"
        except OSError as error:
            return f"{checkpoint} is damaged: {name} cannot be read ({error.strerror})"
    return None
