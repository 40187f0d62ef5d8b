"""Ring of experts: weights circulate, tokens stay.

At hop h this rank holds a slice of the experts of rank r - h. It starts passing the slice on to
r + 1 and receiving the next from r - 1, and meanwhile computes its own tokens' rows for the slice
it holds. Every rank computes exactly its own T * K rows, whatever the router does. In backward
weights circulate again: the rank rebuilds its tokens' hidden activations for the slice step by step
and computes their gradients. Input gradients stay on the rank; weight gradients travel home one hop
behind (``circulation``).

Sent per rank: forward ``(W - 1) * e`` experts; backward as many in the weights' dtype, and as many
gradients in ``options.grad_dtype``. Buffers: two slices of weights and in backward three of
gradients (at W = 2 one and two). The rank's own slice is sent from the parameters themselves.

Shape legend: T tokens, K top-k, D model dimension, e experts of this rank.
"""

from collections.abc import Iterator

import torch

from relay_kernels import (
    ExpertWeights,
    Gradients,
    RoutedTokens,
    backward_experts_,
    backward_workspace,
    forward_experts_,
    forward_workspace,
)
from titan_relay.moe.call import RelayCall, Wants
from titan_relay.moe.circulation import Slices, Tensors, visits
from titan_relay.moe.shapes import expert_slices, step_shape


def _visiting_experts(
    call: RelayCall,
    tokens: RoutedTokens,
    weights: ExpertWeights,
    result: Tensors,
    sum_dtype: torch.dtype | None = None,
) -> Iterator[tuple[RoutedTokens, ExpertWeights, Tensors]]:
    """Per hop: the tokens with the rows for some experts, these, and where their sums are made."""
    bounds = expert_slices(call.shape, call.options)
    lengths = [last - first for first, last in bounds]
    slices = Slices([lengths] * call.num_ranks, longest=lengths[0])
    for visit in visits(call, "experts", weights.tensors(), result, slices, sum_dtype):
        base = visit.owner * call.shape.num_local_experts
        first, last = bounds[visit.slice_index]
        routed = tokens.of_experts(base + first, base + last)
        yield routed, ExpertWeights(*visit.held), visit.share


def experts_forward(call: RelayCall, tokens: RoutedTokens, weights: ExpertWeights) -> torch.Tensor:
    """``out_TD``, in the dtype of ``x_TD``."""
    out_TD = _zeros_like(tokens.x_TD)
    step = step_shape(call.shape, call.options, out_TD.device, "experts")
    workspace = forward_workspace(step)
    for routed, held, _ in _visiting_experts(call, tokens, weights, []):
        forward_experts_(out_TD, routed, held, call.activation, workspace)
    return out_TD


def experts_backward(
    call: RelayCall,
    wants: Wants,
    dout_TD: torch.Tensor,
    tokens: RoutedTokens,
    weights: ExpertWeights,
) -> Gradients:
    """The gradients asked for.

    Without weight gradients (frozen experts) there is no work for them and nothing comes home.
    """
    gradients = Gradients(
        _zeros_like(tokens.x_TD) if wants.x else None,
        _zeros_like(tokens.scores_TK) if wants.scores else None,
        weights.empty_like(weights.num_experts) if wants.weights else None,
    )
    sum_dtype = call.options.sum_dtype(call.shape.dtype) if wants.weights else None
    result = [] if gradients.weights is None else gradients.weights.tensors()
    step = step_shape(call.shape, call.options, dout_TD.device, "experts")
    workspace = backward_workspace(step, sum_dtype)
    for routed, held, share in _visiting_experts(call, tokens, weights, result, sum_dtype):
        dweights = ExpertWeights(*share) if share else None
        into = Gradients(gradients.dx_TD, gradients.dscores_TK, dweights)
        backward_experts_(into, dout_TD, routed, held, call.activation, workspace)
    return gradients


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)
