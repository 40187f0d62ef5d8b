"""Ring of experts, backward: weights circulate again, their gradients follow one hop behind.

At hop h this rank holds a slice of the experts of rank r - h, rebuilds its own tokens' hidden
activations for that slice step by step, and computes their gradients. Input gradients stay on the
rank; weight gradients travel home (``homeward_chain``).

Sent per rank: ``(W - 1) * e`` experts in the weights' dtype, and as many gradients in
``options.grad_dtype``. Buffers: two weight slices and three gradient slices (at W = 2 one and two).

Shape legend: T tokens, K top-k, D model dimension, e experts of this rank.
"""

import torch

from relay_kernels import ExpertWeights, Gradients, backward_experts_, backward_workspace
from titan_relay.moe.call import RelayCall, Wants
from titan_relay.moe.experts_ring import post_weights, weight_buffers
from titan_relay.moe.homeward_chain import HomewardChain, Tensors
from titan_relay.moe.routing import RoutingPlan, segments
from titan_relay.moe.shapes import expert_slices


def experts_backward(
    call: RelayCall,
    wants: Wants,
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
) -> Gradients:
    """The gradients asked for.

    Without weight gradients (frozen experts) there is no work for them and no chain.
    """
    gradients = Gradients(
        _zeros_like(x_TD) if wants.x else None,
        _zeros_like(scores_TK) if wants.scores else None,
        weights.empty_like(weights.num_experts) if wants.weights else None,
    )
    slices = expert_slices(call.shape, call.options)
    longest = slices[0][1]
    sum_dtype = call.options.sum_dtype(call.shape.dtype) if wants.weights else None
    result = [] if gradients.weights is None else gradients.weights.tensors()
    chain = HomewardChain(call.num_ranks, result, longest, sum_dtype)
    workspace = backward_workspace(call.step_shape(call.shape.num_tokens, x_TD.device), sum_dtype)
    exchange, bounds = call.exchange(), plan.bounds()
    buffers = weight_buffers(call, weights, longest)
    for index, (first, last) in enumerate(slices):
        held = weights.experts(first, last)
        for hop in range(call.num_ranks):
            arriving = post_weights(exchange, held, buffers, hop)
            chain.post(exchange, hop, last - first)
            share = chain.share(hop, first, last)
            call.commit(exchange, index, hop)
            base = call.owner(hop) * call.shape.num_local_experts
            backward_experts_(
                Gradients(gradients.dx_TD, gradients.dscores_TK, _weights(share)),
                dout_TD,
                x_TD,
                scores_TK,
                plan.rows_N,
                segments(bounds, base + first, base + last),
                held,
                call.activation,
                workspace,
            )
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
