"""Ring of experts: weights circulate, tokens stay.

At hop h this rank holds a slice of the experts of rank r - h. It starts passing the slice on to
r + 1 and receiving the next from r - 1, and meanwhile computes its own tokens' rows for the slice
it holds. Every rank computes exactly its own T * K rows, whatever the router does. In backward
weights circulate again: the rank rebuilds its tokens' hidden activations for the slice step by step
and computes their gradients. Input gradients stay on the rank; weight gradients travel home one hop
behind (``homeward_chain``).

Sent per rank: forward ``(W - 1) * e`` experts; backward as many in the weights' dtype, and as many
gradients in ``options.grad_dtype``. Buffers: two slices of weights and in backward three of
gradients (at W = 2 one and two). The rank's own slice is sent from the parameters themselves.

Shape legend: T tokens, K top-k, D model dimension, e experts of this rank.
"""

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
from titan_relay.moe.homeward_chain import HomewardChain, Tensors
from titan_relay.moe.shapes import expert_slices
from titan_relay.moe.transport import RingExchange


def weight_buffers(call: RelayCall, weights: ExpertWeights, longest: int) -> list[ExpertWeights]:
    """Receive buffers: the slice in use and the one arriving, as far as neither is this rank's."""
    return [weights.empty_like(longest) for _ in range(num_weight_buffers(call.num_ranks))]


def num_weight_buffers(num_ranks: int) -> int:
    return min(2, num_ranks - 1)


def post_weights(
    exchange: RingExchange | None, held: ExpertWeights, buffers: list[ExpertWeights], hop: int
) -> ExpertWeights | None:
    """Queue passing ``held`` on; where the next slice arrives, or None at the last hop."""
    if exchange is None or hop == exchange.size - 1:
        return None
    # Two buffers in turn: at hop h the slice held lies in the other one (or is this rank's own).
    arriving = buffers[hop % 2].experts(0, held.num_experts)
    exchange.send(held.tensors())
    exchange.receive(arriving.tensors())
    return arriving


def experts_forward(call: RelayCall, tokens: RoutedTokens, weights: ExpertWeights) -> torch.Tensor:
    """``out_TD``, in the dtype of ``x_TD``."""
    out_TD = _zeros_like(tokens.x_TD)
    workspace = forward_workspace(call.step_shape(call.shape.num_tokens, out_TD.device))
    exchange = call.exchange()
    slices = expert_slices(call.shape, call.options)
    buffers = weight_buffers(call, weights, longest=slices[0][1])
    for index, (first, last) in enumerate(slices):
        held = weights.experts(first, last)
        for hop in range(call.num_ranks):
            arriving = post_weights(exchange, held, buffers, hop)
            call.commit(exchange, index, hop)
            base = call.owner(hop) * call.shape.num_local_experts
            routed = tokens.of_experts(base + first, base + last)
            forward_experts_(out_TD, routed, held, call.activation, workspace)
            call.wait(exchange)
            held = arriving or held
    call.finish(exchange, "experts")
    return out_TD


def experts_backward(
    call: RelayCall,
    wants: Wants,
    dout_TD: torch.Tensor,
    tokens: RoutedTokens,
    weights: ExpertWeights,
) -> Gradients:
    """The gradients asked for.

    Without weight gradients (frozen experts) there is no work for them and no chain.
    """
    gradients = Gradients(
        _zeros_like(tokens.x_TD) if wants.x else None,
        _zeros_like(tokens.scores_TK) if wants.scores else None,
        weights.empty_like(weights.num_experts) if wants.weights else None,
    )
    slices = expert_slices(call.shape, call.options)
    longest = slices[0][1]
    sum_dtype = call.options.sum_dtype(call.shape.dtype) if wants.weights else None
    result = [] if gradients.weights is None else gradients.weights.tensors()
    chain = HomewardChain(call.num_ranks, result, longest, sum_dtype)
    step = call.step_shape(call.shape.num_tokens, dout_TD.device)
    workspace = backward_workspace(step, sum_dtype)
    exchange = call.exchange()
    buffers = weight_buffers(call, weights, longest)
    for index, (first, last) in enumerate(slices):
        held = weights.experts(first, last)
        for hop in range(call.num_ranks):
            arriving = post_weights(exchange, held, buffers, hop)
            chain.post(exchange, hop, last - first)
            share = chain.share(hop, first, last)
            call.commit(exchange, index, hop)
            base = call.owner(hop) * call.shape.num_local_experts
            into = Gradients(gradients.dx_TD, gradients.dscores_TK, _weights(share))
            routed = tokens.of_experts(base + first, base + last)
            backward_experts_(into, dout_TD, routed, held, call.activation, workspace)
            call.wait(exchange)
            chain.settle(hop)
            held = arriving or held
    chain.bring_home(call, exchange, len(slices) - 1)
    call.finish(exchange, "experts")
    return gradients


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)


def _weights(share: Tensors) -> ExpertWeights | None:
    return ExpertWeights(*share) if share else None
