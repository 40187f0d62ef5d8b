"""Writes a checkpoint so that it is there at once: in a folder of another name, checksummed while
it is written, marked when every rank is done, and then renamed.

Every part happens where `torch.distributed.checkpoint` saves, be it this thread, another or another
process, and the ranks' checksums travel with what they report to the first rank anyway: nothing is
read again, and no further message is sent.
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageWriter,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from titan_relay.titan.hf.completion import FileMark, write_mark
from titan_relay.titan.hf.safe_pickle import METADATA
from titan_relay.titan.train.checkpoint_folder import CheckpointFolder
from titan_relay.units import in_words

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SaveError(Exception):
    """A checkpoint could not be written; ``str()`` is one line with the file and the reason."""


def reason_of(error: BaseException) -> str | None:
    """Why files could not be written, in words; None if `error` is of another kind.

    Raises:
        KeyboardInterrupt: a rank was interrupted, which arrives wrapped.
    """
    failures = (
        [each for each, _ in error.failures.values()]
        if isinstance(error, CheckpointException)
        else [error]
    )
    if any(isinstance(each, KeyboardInterrupt) for each in failures):
        raise KeyboardInterrupt from error
    for each in failures:
        if isinstance(each, OSError):
            return f"{each.filename}: {each.strerror}" if each.filename else str(each)
    return None


@dataclass(frozen=True)
class _Written:
    """What a rank reports: torch's results, and its files with their marks."""

    results: list[WriteResult]
    files: dict[str, FileMark]


class MarkingWriter(StorageWriter):
    """Writes `step-N`; see `torch.distributed.checkpoint.StorageWriter`.

    It has a `FileSystemWriter` and is none, because torch would let that copy the tensors of an
    asynchronous save, which it does for those of a GPU only.

    Raises:
        OSError: from writing, with the file's name and the space that it needs.
    """

    def __init__(self, folder: CheckpointFolder, step: int) -> None:
        self._folder, self._step = folder, step
        self._path = folder.saving(step)
        self._files = _SummedFiles()
        self._writer = FileSystemWriter(self._path)
        self._writer.fs = self._files

    def reset(self, checkpoint_id: Any = None) -> None:
        """Torch may ask for another folder, and does not."""
        self._writer.reset()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._writer.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return self._writer.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return self._writer.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        """On every rank: write its file."""
        with _space_named(self._path, sum(_size_bytes(item) for item in plan.items)):
            results = self._writer.write_data(plan, planner).wait()
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(_Written(results, dict(self._files.written)))
        return done

    def finish(self, metadata: Metadata, results: Any) -> None:
        """On the first rank, when all have written: write the metadata and the mark, and rename."""
        with _space_named(self._path, 0):
            self._writer.finish(metadata, [each.results for each in results])
            files = {name: mark for each in results for name, mark in each.files.items()}
            files[METADATA] = self._files.written[f"{METADATA}.tmp"]
            write_mark(self._path, self._step, files)
            self._folder.publish(self._step)

    def storage_meta(self) -> StorageMeta | None:
        return self._writer.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _SummedFiles(FileSystem):
    """Local files, with the size and checksum of what is written to each, by name."""

    def __init__(self) -> None:
        self.written: dict[str, FileMark] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        summed = _Summed()
        try:
            with super().create_stream(path, mode) as stream:
                summed.file = stream
                yield summed
        except Exception as error:
            # A failed write may arrive as what torch's own file format makes of it.
            cause = summed.failure or error
            if not isinstance(cause, OSError):
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        else:
            self.written[Path(path).name] = FileMark(summed.size_bytes, summed.crc32)


class _Summed:
    """A file that is written from its beginning to its end."""

    def __init__(self) -> None:
        self.file: Any = None
        self.size_bytes = self.crc32 = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        try:
            self.file.write(data)
        except OSError as error:
            self.failure = error
            raise
        view = memoryview(data).cast("B")
        self.size_bytes += view.nbytes
        self.crc32 = zlib.crc32(view, self.crc32)
        return view.nbytes

    def tell(self) -> int:
        """How many bytes were written."""
        return self.size_bytes

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        self.file.flush()

    def close(self) -> None:
        """Write what is buffered, and close."""
        self.file.close()

    def fileno(self) -> int:
        """The number of the open file, by which it can be forced to the disk."""
        return int(self.file.fileno())


def _size_bytes(item: Any) -> int:
    if item.tensor_data is None:
        return 0
    itemsize: int = item.tensor_data.properties.dtype.itemsize
    return int(item.tensor_data.chunk.sizes.numel()) * itemsize


@contextmanager
def _space_named(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Say with an error of no room how much is needed and how much there is."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        needed = f"it needs {in_words(needed_bytes)}, " if needed_bytes else ""
        free = in_words(shutil.disk_usage(folder).free)
        raise OSError(
            error.errno, f"{error.strerror} ({needed}{free} free)", error.filename
        ) from error
