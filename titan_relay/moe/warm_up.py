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
    RoutedTokens,
    StepShape,
    SwiGLU,
    backward_experts_,
    backward_workspace,
    forward_experts_,
    forward_workspace,
    uses_triton,
)
from titan_relay.moe.options import RelayOptions
from titan_relay.moe.routing import sort_rows
from titan_relay.moe.shapes import (
    Circulation,
    LayerShape,
    expert_slices,
    step_shape,
    token_slices,
)
from titan_relay.moe.traffic import backward_traffic, circulations, forward_traffic

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
    for circulate in circulations(forward_traffic(shape, options), options):
        step = step_shape(shape, options, device, circulate)
        for num_experts in _group_sizes(shape, options, circulate):
            tokens, weights = _experts(shape, device, num_experts)
            out_TD, workspace = torch.zeros_like(tokens.x_TD), forward_workspace(step)
            forward_experts_(out_TD, tokens, weights, activation, workspace)
    sum_dtype = options.sum_dtype(shape.dtype)
    for circulate in circulations(backward_traffic(shape, options), options):
        step = step_shape(shape, options, device, circulate)
        # A ring of tokens goes on summing from its second hop on; in a ring of experts sums travel.
        accumulates = (False, True) if circulate == "tokens" else (False,)
        for num_experts in _group_sizes(shape, options, circulate):
            tokens, weights = _experts(shape, device, num_experts)
            dweights = weights.empty_like(num_experts, sum_dtype)
            for accumulate in accumulates:
                _backward(tokens, weights, dweights, accumulate, activation, step)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin_s


def _group_sizes(shape: LayerShape, options: RelayOptions, circulate: Circulation) -> list[int]:
    """How many experts are computed together; kernels are compiled for their number."""
    if circulate == "tokens":
        return [shape.num_local_experts]
    return sorted({last - first for first, last in expert_slices(shape, options)})


def _experts(
    shape: LayerShape, device: torch.device, num_experts: int
) -> tuple[RoutedTokens, ExpertWeights]:
    """A few tokens, rows of theirs dealt out evenly, and experts: what comes out is thrown away."""
    num_rows = _TOKENS * shape.top_k
    bounds = [num_rows * expert // num_experts for expert in range(num_experts + 1)]
    tokens = RoutedTokens(
        torch.zeros(_TOKENS, shape.dim, dtype=shape.dtype, device=device),
        torch.zeros(_TOKENS, shape.top_k, dtype=shape.score_dtype, device=device),
        torch.arange(num_rows, dtype=torch.int32, device=device),
        list(itertools.pairwise(bounds)),
    )
    dim, expert_dim = shape.dim, shape.expert_dim
    sizes: list[tuple[int, ...]] = [(expert_dim, dim), (dim, expert_dim), (expert_dim, dim)]
    if shape.has_biases:
        sizes += [(expert_dim,), (dim,), (expert_dim,)]
    tensors = [torch.empty(num_experts, *size, dtype=shape.dtype, device=device) for size in sizes]
    return tokens, ExpertWeights(*tensors)


def _backward(
    tokens: RoutedTokens,
    weights: ExpertWeights,
    dweights: ExpertWeights,
    accumulate: bool,
    activation: SwiGLU,
    step: StepShape,
) -> None:
    x_TD, workspace = tokens.x_TD, backward_workspace(step, dweights.w1_gFD.dtype)
    dscores_TK = torch.zeros_like(tokens.scores_TK)
    into = Gradients(torch.zeros_like(x_TD), dscores_TK, dweights, accumulate)
    backward_experts_(into, torch.zeros_like(x_TD), tokens, weights, activation, workspace)
