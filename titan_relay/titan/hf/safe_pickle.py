"""Reading a distributed checkpoint without running anything that it says.

The metadata of `torch.distributed.checkpoint` is a pickle, which may name any function of the
process that reads it, and so are the entries that are no tensors. Here metadata is read by an
unpickler that knows the classes of metadata alone, and entries as `torch.load` reads weights. The
tensors are read so by torch itself.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    Metadata,
)
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from titan_relay.titan.hf.errors import HfError

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.storage", "WriteResult"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "Path")),
}


class _Unpickler(pickle.Unpickler):
    """Admits what checkpoints are described by; names nothing else, and so calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise HfError(f"names {module}.{name}, which no checkpoint needs: nothing of it was run")


def unpickle(file: IO[bytes], where: str) -> Any:
    """What metadata is made of, from a pickle.

    Raises:
        HfError: one line that begins with `where`: the pickle names other things, or is none.
    """
    try:
        return _Unpickler(file).load()
    except HfError as error:
        raise HfError(f"{where} {error}") from None
    except Exception as error:  # whatever unpickling garbage raises
        kind = type(error).__name__
        raise HfError(f"{where} is damaged: it cannot be read ({kind})") from error


class SafeReader(FileSystemReader):
    """Reads a checkpoint of a folder or a remote address; see `FileSystemReader`.

    Raises:
        HfError: from `read_metadata`, as `unpickle`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        if "://" in str(path):
            self.fs: Any = _RemoteFiles(str(path))
            self.path = self.fs.root

    # Not `kwargs`: torch would go on to the metadata of single ranks, which nobody here writes.
    def read_metadata(self, *unused: Any, **also_unused: Any) -> Metadata:
        path = self.fs.concat_path(self.path, METADATA)
        with self.fs.create_stream(path, "rb") as file:
            metadata = unpickle(file, str(path))
        try:
            places = metadata.storage_data.values()
            outside = [each.relative_path for each in places if "/" in each.relative_path]
            metadata.state_dict_metadata.items()
        except (AttributeError, TypeError) as error:
            raise HfError(f"{path} is damaged: it describes no checkpoint") from error
        if outside:
            raise HfError(f"{path} names a file outside its folder: {outside[0]}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        assert isinstance(metadata, Metadata)
        return metadata


class _RemoteFiles:
    """What a reader asks of a file system, at an address."""

    def __init__(self, address: str) -> None:
        import fsspec  # slow to import, and seldom needed

        self._files, self.root = fsspec.core.url_to_fs(address)

    def create_stream(self, path: str, mode: str) -> Any:
        return self._files.open(path, mode)

    def concat_path(self, path: str, suffix: str) -> str:
        return f"{path}/{suffix}"


class SafeLoadPlanner(DefaultLoadPlanner):
    """Takes entries that are no tensors only as plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As `DefaultLoadPlanner.load_bytes`, which unpickles anything: it gets a new pickle."""
        name = read_item.dest_index.fqn
        try:
            plain = torch.load(value, weights_only=True)
        except Exception as error:  # whatever unpickling garbage raises
            reason = str(error).split("\n", 1)[0][:200]
            raise HfError(
                f"the entry {name} is damaged or holds more than plain values, and was not run "
                f"({type(error).__name__}: {reason})"
            ) from None
        clean = io.BytesIO()
        torch.save(plain, clean)
        clean.seek(0)
        super().load_bytes(read_item, clean)
