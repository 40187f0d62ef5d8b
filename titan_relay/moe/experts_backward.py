"""Ring of experts, backward: weights circulate again, their gradients follow one hop behind.

At hop h this rank holds a slice of the experts of rank r - h, rebuilds its own tokens' hidden
activations for that slice step by step, and computes their gradients. Input gradients stay on the
rank; weight gradients travel home (``homeward_chain``).

Sent per rank: ``(W - 1) * e`` experts in the weights' dtype, and as many gradients in
``options.grad_dtype``. Buffers: two weight slices and three gradient slices (at W = 2 one and two).

Shape legend: T tokens, K top-k, D model dimension, e experts of this rank.
"""

import torch

from relay_kernels import BackwardWorkspace, ExpertWeights, Gradients, backward_experts_
from titan_relay.moe.call import RelayCall, Wants
from titan_relay.moe.experts_ring import post_weights, weight_buffers
from titan_relay.moe.homeward_chain import HomewardChain
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
        torch.zeros_like(x_TD, memory_format=torch.contiguous_format) if wants.x else None,
        torch.zeros_like(scores_TK, memory_format=torch.contiguous_format)
        if wants.scores
        else None,
        weights.empty_like(weights.num_experts) if wants.weights else None,
    )
    slices = expert_slices(call.shape, call.options)
    longest = slices[0][1]
    sum_dtype, chain = None, None
    if gradients.weights is not None:
        sum_dtype = call.options.sum_dtype(call.shape.dtype)
        chain = HomewardChain(call.num_ranks, gradients.weights.tensors(), longest, sum_dtype)
    workspace = BackwardWorkspace(call.step_shape(call.shape.num_tokens, x_TD.device), sum_dtype)
    exchange, bounds = call.exchange(), plan.bounds()
    buffers = weight_buffers(call, weights, longest)
    for index, (first, last) in enumerate(slices):
        held = weights.experts(first, last)
        for hop in range(call.num_ranks):
            arriving = post_weights(exchange, held, buffers, hop)
            share = None
            if chain is not None:
                chain.post(exchange, hop, last - first)
                share = ExpertWeights(*chain.share(hop, first, last))
            call.commit(exchange, index, hop)
            base = call.owner(hop) * call.shape.num_local_experts
            backward_experts_(
                Gradients(gradients.dx_TD, gradients.dscores_TK, share),
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
            if chain is not None:
                chain.settle(hop)
            held = arriving or held
    if chain is not None:
        chain.post(exchange, 0, longest)
        call.commit(exchange, len(slices) - 1, call.num_ranks)
        call.wait(exchange)
        chain.finish()
    call.finish(exchange)
    return gradients
