"""Single tensors in and out of safetensors files, without holding a file in memory.

The format (https://github.com/huggingface/safetensors): 8 bytes that count those of a JSON header,
the header with each tensor's dtype, shape and place, then the tensors' bytes. The `safetensors`
package writes a file from tensors that are all there at once, and reads through a memory map, which
counts as this process's memory; here a tensor is read into its own memory and written in its place,
so the largest tensor is what counts. Files are byte for byte those of the package.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from titan_relay.titan.hf.errors import HfError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PREFIX_BYTES = 8
_LARGEST_HEADER_BYTES = 100_000_000  # the package's own limit


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype of a tensor as it lies, or is to lie, in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorPlace(StoredTensor):
    """And where its bytes are in its file."""

    offset: int


def read_places(path: Path) -> dict[str, TensorPlace]:
    """Where each tensor of a file is.

    Raises:
        HfError: the file is no safetensors file, is cut short, or has a dtype that is not known.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_PREFIX_BYTES), "little")
            if not 0 < header_bytes <= min(_LARGEST_HEADER_BYTES, size_bytes - _PREFIX_BYTES):
                raise HfError(f"{path} is no safetensors file, or is cut short")
            header = json.loads(file.read(header_bytes))
    except OSError as error:
        raise HfError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, HfError):
            raise
        raise HfError(f"{path} is no safetensors file: its header is not JSON") from error
    start = _PREFIX_BYTES + header_bytes
    places = {
        name: _place(path, name, entry, start)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    end = max((each.offset + each.num_bytes for each in places.values()), default=start)
    if end > size_bytes:
        raise HfError(f"{path} is cut short: {size_bytes} bytes of {end}; copy it again")
    return places


def _place(path: Path, name: str, entry: dict, start: int) -> TensorPlace:
    try:
        dtype, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise HfError(f"{path} is no safetensors file: bad entry for {name}") from error
    if dtype not in DTYPES:
        raise HfError(f"{path}: {name} has dtype {dtype}, which is not supported")
    place = TensorPlace(tuple(shape), DTYPES[dtype], start + first)
    if place.num_bytes != end - first:
        raise HfError(f"{path}: {name} takes {end - first} bytes, its shape {place.num_bytes}")
    return place


def read_tensor(path: Path, place: TensorPlace) -> torch.Tensor:
    """One tensor, in memory of its own."""
    tensor = torch.empty(place.shape, dtype=place.dtype)
    with path.open("rb") as file:
        file.seek(place.offset)
        if file.readinto(_as_bytes(tensor)) < place.num_bytes:
            raise HfError(f"{path} was cut short while it was read")
    return tensor


class FileLayout:
    """Header and places of a file that is to be written."""

    def __init__(self, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        """`tensors`: name, dtype and shape of each, in any order."""
        # The package's order: wide types first (so that every tensor is aligned), then by name.
        ordered = sorted(tensors, key=lambda each: (-_rank(each[1]), each[0]))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        relative: dict[str, TensorPlace] = {}
        offset = 0
        for name, dtype, shape in ordered:
            relative[name] = TensorPlace(shape, dtype, offset)
            end = offset + relative[name].num_bytes
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(_PREFIX_BYTES, "little") + text
        self.places = {
            name: replace(each, offset=len(self.head) + each.offset)
            for name, each in relative.items()
        }
        self.num_bytes = len(self.head) + offset

    def create(self, path: Path) -> None:
        """Write the header and reserve the length; tensors are written into it later."""
        with path.open("wb") as file:
            file.write(self.head)
            file.truncate(self.num_bytes)

    def write(self, path: Path, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor's bytes in their place."""
        place = self.places[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (place.dtype, place.shape), name
        with path.open("r+b") as file:
            file.seek(place.offset)
            file.write(_as_bytes(tensor.contiguous()))


def _rank(dtype: torch.dtype) -> int:
    """Where the package puts a dtype: the order of its own list, narrow to wide."""
    order = ["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "F16", "BF16", "I32", "F32"]
    return [*order, "F64", "I64"].index(_NAMES[dtype])


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def flush_to_disk(path: Path) -> None:
    """Return once the file's bytes are on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
