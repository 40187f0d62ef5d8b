"""A distributed checkpoint written and read a few tensors at a time, by one process.

To `torch.distributed.checkpoint` a checkpoint is what several ranks wrote: each its own part, then
one of them the metadata. Here one process plays all ranks in turn. A part is one file, so what is
finished stays finished when the process is killed.

torchtitan's own conversion (its adapters over `dcp.load` and `dcp.save` with the Hugging Face
storage of `torch.distributed.checkpoint`) is not used, because it holds the whole model: of 301 MiB
of weights, the largest tensor 16 MiB, it took 683 MiB from Hugging Face and 467 to it, and this
265 MiB (a part is held while it is written) and 50. `tests/titan/hf/test_memory.py` measures it.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from titan_relay.titan.hf.completion import check_mark_is_there, check_sizes, missing
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.hf.safe_pickle import METADATA, SafeReader, unpickle
from titan_relay.titan.hf.safetensors_file import StoredTensor


class _LazyPlanner(DefaultSavePlanner):
    """Plans from meta tensors and asks for a tensor's value only when it is written."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._read(write_item.index.fqn)


class PartsWriter:
    """Writes a checkpoint part after part; `read(name)` supplies each tensor's value in time."""

    def __init__(
        self,
        path: Path,
        parts: list[dict[str, StoredTensor]],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        self._writer = FileSystemWriter(path, sync_files=True)
        self._planners = [_LazyPlanner(read) for _ in parts]
        plans = []
        for index, (planner, part) in enumerate(zip(self._planners, parts, strict=True)):
            empty = {
                name: torch.empty(each.shape, dtype=each.dtype, device="meta")
                for name, each in part.items()
            }
            planner.set_up_planner(empty, is_coordinator=index == 0)
            plans.append(planner.create_local_plan())
        self._writer.set_up_storage_writer(is_coordinator=True)
        plans = [self._writer.prepare_local_plan(plan) for plan in plans]
        plans, self._metadata = self._planners[0].create_global_plan(plans)
        self._plans = self._writer.prepare_global_plan(plans)

    def write(self, index: int) -> str:
        """Write a part; returns its receipt for `finish`, perhaps that of another process."""
        planner = self._planners[index]
        results = self._writer.write_data(planner.finish_plan(self._plans[index]), planner).wait()
        return base64.b64encode(pickle.dumps(results)).decode()

    def finish(self, receipts: list[str]) -> None:
        """Write the metadata, with which the checkpoint is complete."""
        where = "the journal of this conversion"
        results = [unpickle(io.BytesIO(base64.b64decode(each)), where) for each in receipts]
        self._writer.finish(self._metadata, results)


class PartsReader:
    """Reads single tensors of a checkpoint, whoever wrote it on however many ranks."""

    def __init__(self, path: Path) -> None:
        """Raises `HfError` where the folder is no complete checkpoint."""
        if not (path / METADATA).is_file():
            raise HfError(
                f"{path} is no complete checkpoint: it has no {METADATA}; name a step's folder, "
                "such as outputs/checkpoint/step-100"
            )
        self._path = path
        check_sizes(path)
        self._reader = SafeReader(path)
        self._metadata: Any = self._reader.read_metadata()
        check_mark_is_there(path, self._metadata.storage_meta)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._check_files()
        self.names = list(self._metadata.state_dict_metadata)  # of what is no tensor too
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(tuple(each.size), each.properties.dtype)
            for name, each in self._metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        places: dict[MetadataIndex, Any] = self._metadata.storage_data
        for each in places.values():
            ends[each.relative_path] = max(
                ends.get(each.relative_path, 0), each.offset + each.length
            )
        for name, end_bytes in ends.items():
            file = self._path / name
            if not file.is_file():
                raise HfError(missing(self._path, name))
            if file.stat().st_size < end_bytes:
                raise HfError(f"{self._path} is damaged: {name} is cut short")

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor."""
        stored = self.tensors[name]
        value = torch.empty(stored.shape, dtype=stored.dtype)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({name: value}, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return value
