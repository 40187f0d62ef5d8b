"""Compile the fused kernels of a layer before it first runs.

Triton compiles a kernel when it is first launched with new types, constants or sizes: some seconds
each, which would otherwise fall into the first training step and look like a slow or hanging rank.

Shape legend: t tokens, K top-k, D model dimension, F expert hidden dimension, g experts of a slice.
"""

import itertools
import time

import torch

from relay_kernels import (
    ExpertWeights,
    Gradients,
    SwiGLU,
    backward_experts_,
    backward_workspace,
    forward_experts_,
    forward_workspace,
    uses_triton,
)
from titan_relay.moe.options import RelayOptions
from titan_relay.moe.routing import Segment, sort_rows
from titan_relay.moe.shapes import LayerShape, expert_slices, step_shape, token_slices
from titan_relay.moe.traffic import Circulation, backward_traffic, circulations, forward_traffic

_TOKENS = 8
_PLAIN = SwiGLU()


def warm_up(
    shape: LayerShape,
    options: RelayOptions,
    device: torch.device,
    activation: SwiGLU = _PLAIN,
) -> float:
    """Launch every kernel of the layer's forward and backward once, on a few rows; wait for it.

    Works with memory of about a slice of experts, its gradients and a step, and gives it up again.
    Sends nothing. Call it on every rank before the first step; later calls cost a moment.

    Returns:
        Seconds that it took; 0 in plain PyTorch, where there is nothing to compile.
    """
    if not uses_triton(options.kernels, device, shape.dtype):
        return 0.0
    begin_s = time.perf_counter()
    slices = token_slices(shape.num_tokens, shape.num_ranks, options)
    ids_TK = torch.zeros(shape.num_tokens, shape.top_k, dtype=torch.int64, device=device)
    sort_rows(ids_TK, shape.num_experts, slices, options.kernels)
    for direction, traffic in (
        (_forward, forward_traffic(shape, options)),
        (_backward, backward_traffic(shape, options)),
    ):
        for circulate in circulations(traffic, options):
            for num_experts in _group_sizes(shape, options, circulate):
                direction(shape, options, device, activation, num_experts, circulate)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin_s


def _group_sizes(shape: LayerShape, options: RelayOptions, circulate: Circulation) -> list[int]:
    """How many experts are computed together; kernels are compiled for their number."""
    if circulate == "tokens":
        return [shape.num_local_experts]
    return sorted({last - first for first, last in expert_slices(shape, options)})


def _tokens_at_hand(shape: LayerShape, options: RelayOptions, circulate: Circulation) -> int:
    if circulate == "experts":
        return shape.num_tokens
    return token_slices(shape.num_tokens, shape.num_ranks, options).length


class _Rows:
    """A few tokens, and rows of theirs dealt out evenly to ``num_experts`` experts."""

    def __init__(self, shape: LayerShape, device: torch.device, num_experts: int) -> None:
        num_rows = _TOKENS * shape.top_k
        self.x_TD = torch.zeros(_TOKENS, shape.dim, dtype=shape.dtype, device=device)
        self.scores_TK = torch.zeros(_TOKENS, shape.top_k, dtype=shape.score_dtype, device=device)
        self.rows_N = torch.arange(num_rows, dtype=torch.int32, device=device)
        bounds = [num_rows * expert // num_experts for expert in range(num_experts + 1)]
        self.segments: list[Segment] = list(itertools.pairwise(bounds))
        self.weights = _weights(shape, device, num_experts)


def _weights(shape: LayerShape, device: torch.device, num_experts: int) -> ExpertWeights:
    """Uninitialised: what comes out is thrown away."""
    sizes: list[tuple[int, ...]] = [
        (num_experts, shape.expert_dim, shape.dim),
        (num_experts, shape.dim, shape.expert_dim),
        (num_experts, shape.expert_dim, shape.dim),
    ]
    if shape.has_biases:
        sizes += [(num_experts, width) for width in (shape.expert_dim, shape.dim, shape.expert_dim)]
    return ExpertWeights(*(torch.empty(size, dtype=shape.dtype, device=device) for size in sizes))


def _forward(
    shape: LayerShape,
    options: RelayOptions,
    device: torch.device,
    activation: SwiGLU,
    num_experts: int,
    circulate: Circulation,
) -> None:
    rows = _Rows(shape, device, num_experts)
    tokens = _tokens_at_hand(shape, options, circulate)
    workspace = forward_workspace(step_shape(shape, options, device, tokens))
    forward_experts_(
        torch.zeros_like(rows.x_TD),
        rows.x_TD,
        rows.scores_TK,
        rows.rows_N,
        rows.segments,
        rows.weights,
        activation,
        workspace,
    )


def _backward(
    shape: LayerShape,
    options: RelayOptions,
    device: torch.device,
    activation: SwiGLU,
    num_experts: int,
    circulate: Circulation,
) -> None:
    rows = _Rows(shape, device, num_experts)
    tokens = _tokens_at_hand(shape, options, circulate)
    sum_dtype = options.sum_dtype(shape.dtype)
    workspace = backward_workspace(step_shape(shape, options, device, tokens), sum_dtype)
    dweights = rows.weights.empty_like(num_experts, sum_dtype)
    # A ring of tokens goes on summing from its second hop on; in a ring of experts sums travel.
    for accumulates in (False, True) if circulate == "tokens" else (False,):
        backward_experts_(
            Gradients(
                torch.zeros_like(rows.x_TD),
                torch.zeros_like(rows.scores_TK),
                dweights,
                accumulate_weights=accumulates,
            ),
            torch.zeros_like(rows.x_TD),
            rows.x_TD,
            rows.scores_TK,
            rows.rows_N,
            rows.segments,
            rows.weights,
            activation,
            workspace,
        )
