"""The static shape of one call, alike on every rank, and what "auto" makes of it.

Notation: W ranks, T tokens per rank, D model dimension, F expert hidden dimension, E experts,
e = E / W experts of a rank, K top-k.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from relay_kernels import StepShape
from titan_relay.moe.options import RelayOptions
from titan_relay.moe.routing import TokenSlices

Circulation = Literal["experts", "tokens"]

# What "auto" aims at.
_RING_BUFFER_UNITS = 2.0  # ring buffers of the backward, in copies of the tokens
_TOKEN_SLICES = 2  # a ring of tokens has up to 7 blocks; each slice passes over all weights
_CPU_ROWS_PER_STEP = 512  # fewer steps for 4 MiB more scratch than 256; measured fastest per byte
_DEVICE_ROWS_PER_STEP = 8192  # enough tiles for every multiprocessor


@dataclass(frozen=True)
class LayerShape:
    """One layer on one rank. Equal on all ranks; so ``num_tokens`` is the most that any has."""

    num_ranks: int
    num_tokens: int
    dim: int
    expert_dim: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    score_dtype: torch.dtype = torch.float32
    has_biases: bool = False

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def expert_numel(self) -> int:
        """Elements of one expert."""
        biases = 2 * self.expert_dim + self.dim if self.has_biases else 0
        return 3 * self.dim * self.expert_dim + biases

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a token's hidden state."""
        return self.dim * self.dtype.itemsize

    @property
    def scores_bytes(self) -> int:
        """Bytes of a token's scores."""
        return self.top_k * self.score_dtype.itemsize

    @property
    def rows_bytes(self) -> int:
        """Bytes of a token's row numbers, which are int32."""
        return self.top_k * 4


def expert_slices(shape: LayerShape, options: RelayOptions) -> list[tuple[int, int]]:
    """The slices of a rank's experts, ``(first, last)``; the first is the longest."""
    return slice_bounds(shape.num_local_experts, _num_expert_slices(shape, options))


def _num_expert_slices(shape: LayerShape, options: RelayOptions) -> int:
    if shape.num_ranks == 1:
        return 1
    if options.num_slices != "auto":
        return min(options.num_slices, shape.num_local_experts)
    grad_itemsize = options.sum_dtype(shape.dtype).itemsize
    share_bytes = shape.num_local_experts * shape.expert_numel
    share_bytes *= 2 * shape.dtype.itemsize + 3 * grad_itemsize
    target_bytes = _RING_BUFFER_UNITS * shape.num_tokens * shape.dim * shape.dtype.itemsize
    wanted = math.ceil(share_bytes / max(target_bytes, 1.0))
    experts_per_slice = max(1, shape.num_local_experts // wanted)
    return math.ceil(shape.num_local_experts / experts_per_slice)


def token_slices(num_tokens: int, num_ranks: int, options: RelayOptions) -> TokenSlices:
    """The slices of every rank's tokens in a ring of tokens."""
    num = _TOKEN_SLICES if options.num_slices == "auto" else options.num_slices
    if num_ranks == 1 or num_tokens == 0:
        num = 1
    length = max(1, math.ceil(num_tokens / num))
    return TokenSlices(max(1, math.ceil(num_tokens / length)), length)


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


def step_shape(
    shape: LayerShape, options: RelayOptions, device: torch.device, circulate: Circulation
) -> StepShape:
    """What a step works with: all of a rank's tokens are at hand, or a slice where they circulate.

    Several experts with few rows share a step, so a few tokens may have more rows than tokens.
    """
    num_tokens = shape.num_tokens
    if circulate == "tokens":
        num_tokens = token_slices(num_tokens, shape.num_ranks, options).length
    if options.max_rows_per_step != "auto":
        wanted = options.max_rows_per_step
    elif device.type == "cpu":
        wanted = _CPU_ROWS_PER_STEP
    else:
        wanted = min(_DEVICE_ROWS_PER_STEP, num_tokens)
    num_rows = num_tokens * shape.top_k
    return StepShape(
        max(1, min(wanted, num_rows)),
        shape.dim,
        shape.expert_dim,
        shape.dtype,
        device,
        kernels=options.kernels,
        deterministic=options.deterministic,
        num_rows=num_rows,
        rows_per_expert=num_rows // shape.num_experts,
    )
