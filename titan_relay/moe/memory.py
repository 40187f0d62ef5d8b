"""How much memory one call works with, in bytes, from shapes and options alone.

Counted is what a call allocates and gives up again, and its results ``out``, ``dx`` and
``dscores``; not the parameters, the inputs, and the tensors that become parameters' gradients.
With ``b`` bytes per element, ``bg`` per element of a summed gradient, ``g`` experts in the longest
slice, ``P = 3 D F`` parameters of an expert and ``R`` rows per step:

    routing      20 T K while sorting, then 4 T K until the backward has ended
    forward      T D b  +  B g P b                      +  R (2D + 2F) b + R (16 + b)
    backward     T D b  +  B g P b + C g P bg  + T K bs +  R (2D + 5F + 1) b + R (16 + b)

``B`` is the number of weight slices, 0, 1 or 2 at W = 1, 2 or more; ``C`` that of gradient slices,
0, 2 or 3; ``bs`` the bytes of a score. Where gradients are summed in another dtype than the
weights', two slices more (one at W = 1), and ``R (2D + 3F) bg`` for the widened operands.

Only "routing" depends on top-k, and nothing on what the router does.

Notation: W ranks, T tokens per rank, K top-k, D model dimension, F expert hidden dimension.
"""

from dataclasses import dataclass

import torch

from relay_kernels import BackwardWorkspace, ForwardWorkspace, StepShape
from titan_relay.moe.gradient_chain import num_chain_buffers, num_own_buffers
from titan_relay.moe.options import RelayOptions
from titan_relay.moe.shapes import LayerShape, num_expert_slices, rows_per_step, slice_bounds

_SORTING_BYTES_PER_ROW = 20  # int32 keys, sorted keys, int64 order, int32 order
_ROW_BYTES = 4


@dataclass(frozen=True)
class WorkingMemory:
    """Bytes of one call's parts; ``total_bytes`` is their sum, the peak of the call."""

    tokens_bytes: int  # out, or dx and dscores
    ring_weights_bytes: int
    ring_gradients_bytes: int
    step_bytes: int
    routing_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.tokens_bytes
            + self.ring_weights_bytes
            + self.ring_gradients_bytes
            + self.step_bytes
            + self.routing_bytes
        )


def forward_memory(shape: LayerShape, options: RelayOptions, device: torch.device) -> WorkingMemory:
    """The forward on one rank, after the sort; see ``routing_peak_bytes`` for the sort itself."""
    step = _step_shape(shape, options, device)
    return WorkingMemory(
        tokens_bytes=shape.num_tokens * shape.dim * shape.dtype.itemsize,
        ring_weights_bytes=_ring_weights_bytes(shape, options),
        ring_gradients_bytes=0,
        step_bytes=ForwardWorkspace.num_bytes(step),
        routing_bytes=_ROW_BYTES * shape.num_tokens * shape.top_k,
    )


def backward_memory(
    shape: LayerShape,
    options: RelayOptions,
    device: torch.device,
    *,
    weights_want_gradients: bool = True,
    score_itemsize: int = 4,
) -> WorkingMemory:
    """The backward on one rank."""
    step = _step_shape(shape, options, device)
    sum_dtype = options.sum_dtype(shape.dtype) if weights_want_gradients else None
    scores_bytes = shape.num_tokens * shape.top_k * score_itemsize
    return WorkingMemory(
        tokens_bytes=shape.num_tokens * shape.dim * shape.dtype.itemsize + scores_bytes,
        ring_weights_bytes=_ring_weights_bytes(shape, options),
        ring_gradients_bytes=_ring_gradients_bytes(shape, options, sum_dtype),
        step_bytes=BackwardWorkspace.num_bytes(step, sum_dtype),
        routing_bytes=_ROW_BYTES * shape.num_tokens * shape.top_k,
    )


def routing_peak_bytes(shape: LayerShape) -> int:
    """The sort of a layer's int64 ids, before the forward allocates anything else."""
    return _SORTING_BYTES_PER_ROW * shape.num_tokens * shape.top_k


def _step_shape(shape: LayerShape, options: RelayOptions, device: torch.device) -> StepShape:
    rows = rows_per_step(shape, options, device)
    return StepShape(rows, shape.dim, shape.expert_dim, shape.dtype, device)


def _slice_numel(shape: LayerShape, options: RelayOptions) -> int:
    bounds = slice_bounds(shape.num_local_experts, num_expert_slices(shape, options))
    return bounds[0][1] * shape.expert_numel


def _ring_weights_bytes(shape: LayerShape, options: RelayOptions) -> int:
    num_slices = min(2, shape.num_ranks - 1)
    return num_slices * _slice_numel(shape, options) * shape.dtype.itemsize


def _ring_gradients_bytes(
    shape: LayerShape, options: RelayOptions, sum_dtype: torch.dtype | None
) -> int:
    if sum_dtype is None:
        return 0
    num_slices = num_chain_buffers(shape.num_ranks)
    num_slices += num_own_buffers(shape.num_ranks, sum_dtype != shape.dtype)
    return num_slices * _slice_numel(shape, options) * sum_dtype.itemsize
