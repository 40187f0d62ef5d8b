"""How much memory one call works with, in bytes, from shapes and options alone.

Counted is what a call allocates and gives up again, and its results ``out``, ``dx`` and
``dscores``; not the parameters, the inputs, and the tensors that become parameters' gradients.

With ``b`` bytes per element, ``bg`` per element of a summed gradient, ``bs`` per score; ``R`` rows
per step; ``g`` experts in the longest slice, of ``P = 3 D F`` elements each; ``t`` tokens in the
longest slice; ``B`` = 0, 1, 2 and ``C`` = 0, 2, 3 buffers at W = 1, 2 and more:

    forward    result   T D b
               experts  B g P b
               tokens   B t (D b + K (bs + 4)) + C t D b
               step     R (D + 2F) b + 8 R (8 + b)
    backward   result   T D b + T K bs
               experts  B g P b + C g P bg
               tokens   B t (2 D b + K (bs + 4)) + C t (D b + K bs)
               step     R (2D + 3F + 1) b + F b + 8 R (9 + b), and 2.5 blocks
    routing    20 T K while sorting; then 4 T K until the backward has ended, and another 4 T K
               during a call of a ring of tokens with more than one slice

That is the step in plain PyTorch. The fused kernels' (on CUDA; ``relay_kernels.choice``) has less:
forward ``R F b``, backward ``3 R F b`` (``2 R F b`` without weight gradients) and for a while
4 bytes per row and tile of 32 or more of the ``F``; deterministic sums take ``R D b + 4 T K`` more.

A block is 256 KiB at most (``relay_kernels.workspace.block_rows``). In bfloat16 and float16 what
lies between products is float32 in PyTorch's backward, a block at a time: it has 5.5 blocks, and a
row's scores have 4 bytes.

Where gradients are summed in another dtype than the weights', the backward has ``D F b`` more for a
step's product, and ``2 g P bg`` (experts; one at W = 1) or ``e P bg`` (tokens) for sums.

Only routing, scores and rows depend on top-k, and nothing depends on what the router does, unless
``options.max_imbalance`` lets it choose the ring.

Notation: W ranks, T tokens per rank, K top-k, D model dimension, F expert hidden dimension, e
experts of a rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch

from relay_kernels import backward_workspace_bytes, forward_workspace_bytes
from titan_relay.moe.circulation import (
    num_chain_buffers,
    num_own_buffers,
    num_passing_buffers,
)
from titan_relay.moe.options import RelayOptions
from titan_relay.moe.shapes import (
    Circulation,
    LayerShape,
    expert_slices,
    step_shape,
    token_slices,
)
from titan_relay.moe.traffic import backward_traffic, circulations, forward_traffic

_SORTING_BYTES_PER_ROW = 20  # int32 keys, sorted keys, int64 order, int32 order


@dataclass(frozen=True)
class WorkingMemory:
    """Bytes of one call's parts; their sum is the peak of the call."""

    result_bytes: int  # out, or dx and dscores
    passing_bytes: int  # buffers of what circulates
    homeward_bytes: int  # buffers of the sums on their way home
    step_bytes: int
    routing_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(astuple(self))


def forward_memory(shape: LayerShape, options: RelayOptions, device: torch.device) -> WorkingMemory:
    """The forward on one rank, after the sort; ``routing_peak_bytes`` is the sort itself.

    Where the routing may turn tokens into experts, the larger of both.
    """

    def memory(circulate: Circulation) -> WorkingMemory:
        step_bytes = forward_workspace_bytes(step_shape(shape, options, device, circulate))
        return _memory(shape, options, circulate, shape.hidden_bytes, 0, step_bytes, None)

    return _largest(memory, circulations(forward_traffic(shape, options), options))


def backward_memory(
    shape: LayerShape,
    options: RelayOptions,
    device: torch.device,
    *,
    weights_want_gradients: bool = True,
) -> WorkingMemory:
    """The backward on one rank, with gradients of x and scores wanted; the larger, as above."""
    sum_dtype = options.sum_dtype(shape.dtype) if weights_want_gradients else None
    home_bytes = shape.hidden_bytes + shape.scores_bytes

    def memory(circulate: Circulation) -> WorkingMemory:
        step = step_shape(shape, options, device, circulate)
        step_bytes, dout_bytes = backward_workspace_bytes(step, sum_dtype), shape.hidden_bytes
        return _memory(shape, options, circulate, home_bytes, dout_bytes, step_bytes, sum_dtype)

    return _largest(memory, circulations(backward_traffic(shape, options), options))


def _largest(
    memory: Callable[[Circulation], WorkingMemory], circulating: Sequence[Circulation]
) -> WorkingMemory:
    return max(map(memory, circulating), key=lambda each: each.total_bytes)


def _memory(
    shape: LayerShape,
    options: RelayOptions,
    circulate: Circulation,
    home_bytes: int,
    dout_bytes: int,
    step_bytes: int,
    sum_dtype: torch.dtype | None,
) -> WorkingMemory:
    """With a token's bytes of what comes home and of what goes round besides x, scores and rows."""
    num_passing = num_passing_buffers(shape.num_ranks)
    num_chain = num_chain_buffers(shape.num_ranks)
    routing_bytes = shape.num_tokens * shape.rows_bytes
    if circulate == "experts":
        numel = expert_slices(shape, options)[0][1] * shape.expert_numel
        passing_bytes, homeward_bytes = num_passing * numel * shape.dtype.itemsize, 0
        if sum_dtype is not None:
            num_chain += num_own_buffers(shape.num_ranks, sum_dtype != shape.dtype)
            homeward_bytes = num_chain * numel * sum_dtype.itemsize
    else:
        slices = token_slices(shape.num_tokens, shape.num_ranks, options)
        around_bytes = shape.hidden_bytes + shape.scores_bytes + shape.rows_bytes + dout_bytes
        passing_bytes = num_passing * slices.length * around_bytes
        homeward_bytes = num_chain * slices.length * home_bytes
        if sum_dtype is not None and sum_dtype != shape.dtype:
            share = shape.num_local_experts * shape.expert_numel
            homeward_bytes += share * sum_dtype.itemsize
        routing_bytes *= 2 if slices.num > 1 else 1
    result_bytes = shape.num_tokens * home_bytes
    return WorkingMemory(result_bytes, passing_bytes, homeward_bytes, step_bytes, routing_bytes)


def routing_peak_bytes(num_rows: int) -> int:
    """The sort of ``T K`` int64 ids, before the forward allocates anything else."""
    return _SORTING_BYTES_PER_ROW * num_rows
