"""Ring of experts, backward: weights circulate again, their gradients follow one hop behind.

At hop h this rank holds a slice of the experts of rank r - h, rebuilds its own tokens' hidden
activations for that slice step by step, and computes their gradients. Input gradients stay on the
rank; weight gradients travel home (``gradient_chain``).

Sent per rank: ``(W - 1) * e`` experts in the weights' dtype, and as many gradients in
``options.grad_dtype``. Buffers: two weight slices and three gradient slices (at W = 2 one and two).

Shape legend: T tokens, K top-k, D model dimension, e experts of this rank.
"""

import torch

from relay_kernels import BackwardWorkspace, ExpertWeights, Gradients, backward_experts_
from titan_relay.moe.call import RelayCall
from titan_relay.moe.experts_forward import (
    owner_segments,
    post_weights,
    step_shape,
    weight_buffers,
)
from titan_relay.moe.gradient_chain import GradientChain
from titan_relay.moe.routing import RoutingPlan
from titan_relay.moe.shapes import num_expert_slices, slice_bounds


def experts_backward(
    call: RelayCall,
    gradients: Gradients,
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
) -> None:
    """Fill ``gradients``: ``dx_TD`` (zeroed by the caller), ``dscores_TK`` and the weights'.

    Without weight gradients (frozen experts) there is no work for them and no chain; every rank
    of the group must then ask for none.
    """
    shape = call.shape
    wanted = gradients.weights
    sum_dtype = None if wanted is None else call.options.sum_dtype(shape.dtype)
    workspace = BackwardWorkspace(step_shape(call, x_TD.device), sum_dtype)
    exchange = call.exchange()
    bounds = slice_bounds(shape.num_local_experts, num_expert_slices(shape, call.options))
    buffers = weight_buffers(call, weights, bounds)
    chain = None if wanted is None else GradientChain(call, wanted, bounds[0][1])
    for index, (first, last) in enumerate(bounds):
        held = weights.experts(first, last)
        for hop in range(call.num_ranks):
            arriving = post_weights(exchange, held, buffers, hop)
            if chain is not None:
                chain.post(exchange)
            if exchange is not None:
                exchange.commit(call.where(index, hop))
            share = None if chain is None else chain.share(hop, first, last)
            backward_experts_(
                Gradients(gradients.dx_TD, gradients.dscores_TK, share),
                dout_TD,
                x_TD,
                scores_TK,
                plan.rows_N,
                owner_segments(call, plan, exchange, hop, first, last),
                held,
                call.activation,
                workspace,
            )
            if exchange is not None:
                exchange.wait()
            if chain is not None:
                chain.settle(hop)
            held = arriving or held
    if chain is not None and exchange is not None:
        chain.post(exchange)
        exchange.commit(call.where(len(bounds) - 1, call.num_ranks))
        exchange.wait()
        chain.settle(0)
    call.finish(exchange)
