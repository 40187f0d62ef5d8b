"""Ring of experts, forward: weights circulate, tokens stay.

At hop h this rank holds a slice of the experts of rank r - h. It starts passing the slice on to
r + 1 and receiving the next from r - 1, and meanwhile computes its own tokens' rows for the slice
it holds. Every rank computes exactly its own T * K rows, whatever the router does.

Sent per rank: ``(W - 1) * e`` experts. Ring buffers: one slice at W = 2, else two. The rank's own
slice is sent from the parameters themselves.

Shape legend: T tokens, K top-k, D model dimension, e experts of this rank.
"""

import torch

from relay_kernels import ExpertWeights, forward_experts_, forward_workspace
from titan_relay.moe.call import RelayCall
from titan_relay.moe.experts_ring import post_weights, weight_buffers
from titan_relay.moe.routing import RoutingPlan, segments
from titan_relay.moe.shapes import expert_slices


def experts_forward(
    call: RelayCall,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
) -> torch.Tensor:
    """``out_TD``, in the dtype of ``x_TD``."""
    out_TD = torch.zeros_like(x_TD, memory_format=torch.contiguous_format)
    workspace = forward_workspace(call.step_shape(call.shape.num_tokens, x_TD.device))
    exchange, bounds = call.exchange(), plan.bounds()
    slices = expert_slices(call.shape, call.options)
    buffers = weight_buffers(call, weights, longest=slices[0][1])
    for index, (first, last) in enumerate(slices):
        held = weights.experts(first, last)
        for hop in range(call.num_ranks):
            arriving = post_weights(exchange, held, buffers, hop)
            call.commit(exchange, index, hop)
            base = call.owner(hop) * call.shape.num_local_experts
            forward_experts_(
                out_TD,
                x_TD,
                scores_TK,
                plan.rows_N,
                segments(bounds, base + first, base + last),
                held,
                call.activation,
                workspace,
            )
            call.wait(exchange)
            held = arriving or held
    call.finish(exchange, "experts")
    return out_TD
