"""Work on the rows of a tensor a chunk at a time, so that wide temporaries stay small."""

from collections.abc import Iterator

import torch

# Enough for every core and every multiprocessor to be busy, little beside a copy of the tokens.
_CPU_CHUNK_BYTES = 2**19
_DEVICE_CHUNK_BYTES = 2**26


def row_chunks(num_rows: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """Consecutive slices of `num_rows` rows, each with about as many rows as a chunk has room for.

    row_bytes: what the temporaries of one row take.
    """
    length = _chunk_length(row_bytes, device)
    for start in range(0, num_rows, length):
        yield slice(start, min(start + length, num_rows))


def fake_chunk(x_RD: torch.Tensor, row_bytes: int) -> None:
    """For shape functions: come and go with the memory that one chunk's temporaries take."""
    num_rows = x_RD.numel() // x_RD.shape[-1] if x_RD.shape[-1] else 0
    if isinstance(num_rows, int):  # no compiler traces with symbolic sizes
        num_rows = min(num_rows, _chunk_length(row_bytes, x_RD.device))
        x_RD.new_empty(num_rows * row_bytes, dtype=torch.uint8)


def _chunk_length(row_bytes: int, device: torch.device) -> int:
    limit = _CPU_CHUNK_BYTES if device.type == "cpu" else _DEVICE_CHUNK_BYTES
    return max(1, limit // max(1, row_bytes))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32, or the tensor's own where that is wider."""
    return torch.promote_types(dtype, torch.float32)
