"""The static shape of one call, alike on every rank, and what "auto" makes of it.

Notation: W ranks, T tokens per rank, D model dimension, F expert hidden dimension, E experts,
e = E / W experts of a rank, K top-k.
"""

import math
from dataclasses import dataclass

import torch

from titan_relay.moe.options import AUTO, RelayOptions

# What "auto" aims at.
_RING_BUFFER_UNITS = 2.0  # backward ring buffers, in copies of the tokens
_CPU_ROWS_PER_STEP = 256  # a step's scratch stays within a core's second-level cache
_DEVICE_ROWS_PER_STEP = 4096  # enough tiles for every multiprocessor


@dataclass(frozen=True)
class LayerShape:
    """One layer on one rank."""

    num_ranks: int
    num_tokens: int
    dim: int
    expert_dim: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    has_biases: bool = False

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def expert_numel(self) -> int:
        """Elements of one expert."""
        biases = 2 * self.expert_dim + self.dim if self.has_biases else 0
        return 3 * self.dim * self.expert_dim + biases


def num_expert_slices(shape: LayerShape, options: RelayOptions) -> int:
    """Into how many slices a rank's experts are cut."""
    if options.num_slices != AUTO:
        return min(options.num_slices, shape.num_local_experts)
    if shape.num_ranks == 1:
        return 1
    grad_itemsize = options.sum_dtype(shape.dtype).itemsize
    share_bytes = shape.num_local_experts * shape.expert_numel
    share_bytes *= 2 * shape.dtype.itemsize + 3 * grad_itemsize
    target_bytes = _RING_BUFFER_UNITS * shape.num_tokens * shape.dim * shape.dtype.itemsize
    wanted = math.ceil(share_bytes / max(target_bytes, 1.0))
    experts_per_slice = max(1, shape.num_local_experts // wanted)
    return math.ceil(shape.num_local_experts / experts_per_slice)


def slice_bounds(count: int, num_slices: int) -> list[tuple[int, int]]:
    """``count`` things in ``num_slices`` consecutive slices of nearly equal length.

    The longest comes first, so that it fixes the buffers. Example: 5 in 2 gives (0, 3), (3, 5).
    """
    base, extra = divmod(count, num_slices)
    bounds, start = [], 0
    for index in range(num_slices):
        end = start + base + (1 if index < extra else 0)
        bounds.append((start, end))
        start = end
    return bounds


def rows_per_step(shape: LayerShape, options: RelayOptions, device: torch.device) -> int:
    """Rows computed at a time. One expert has at most one row per token, so never more than T."""
    rows = options.max_rows_per_step
    if rows == AUTO:
        rows = _CPU_ROWS_PER_STEP if device.type == "cpu" else _DEVICE_ROWS_PER_STEP
    return max(1, min(rows, shape.num_tokens))
