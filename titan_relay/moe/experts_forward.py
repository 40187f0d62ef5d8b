"""Ring of experts, forward: weights circulate, tokens stay.

At hop h this rank holds a slice of the experts of rank r - h. It starts passing the slice on to
r + 1 and receiving the next from r - 1, and meanwhile computes its own tokens' rows for the slice
it holds. Every rank computes exactly its own T * K rows, whatever the router does.

Sent per rank: ``(W - 1) * e`` experts. Ring buffers: one slice at W = 2, else two. The rank's own
slice is sent from the parameters themselves.

Shape legend: T tokens, K top-k, D model dimension, e experts of this rank.
"""

import torch

from relay_kernels import ExpertWeights, ForwardWorkspace, StepShape, forward_experts_
from titan_relay.moe.call import RelayCall
from titan_relay.moe.routing import RoutingPlan
from titan_relay.moe.shapes import num_expert_slices, rows_per_step, slice_bounds
from titan_relay.moe.transport import RingExchange


def experts_forward(
    call: RelayCall,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
) -> torch.Tensor:
    """``out_TD``, in the dtype of ``x_TD``."""
    shape = call.shape
    out_TD = torch.zeros_like(x_TD)
    workspace = ForwardWorkspace(step_shape(call, x_TD.device))
    exchange = call.exchange()
    bounds = slice_bounds(shape.num_local_experts, num_expert_slices(shape, call.options))
    buffers = weight_buffers(call, weights, bounds)
    for index, (first, last) in enumerate(bounds):
        held = weights.experts(first, last)
        for hop in range(call.num_ranks):
            arriving = post_weights(exchange, held, buffers, hop)
            if exchange is not None:
                exchange.commit(call.where(index, hop))
            segments = owner_segments(call, plan, exchange, hop, first, last)
            forward_experts_(
                out_TD, x_TD, scores_TK, plan.rows_N, segments, held, call.activation, workspace
            )
            if exchange is not None:
                exchange.wait()
            held = arriving or held
    call.finish(exchange)
    return out_TD


def step_shape(call: RelayCall, device: torch.device) -> StepShape:
    shape = call.shape
    rows = rows_per_step(shape, call.options, device)
    return StepShape(rows, shape.dim, shape.expert_dim, shape.dtype, device)


def weight_buffers(
    call: RelayCall, weights: ExpertWeights, bounds: list[tuple[int, int]]
) -> list[ExpertWeights]:
    """Receive buffers: the slice in use and the one arriving, as far as neither is this rank's."""
    longest = bounds[0][1] - bounds[0][0]
    return [weights.empty_like(longest) for _ in range(min(2, call.num_ranks - 1))]


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


def owner_segments(
    call: RelayCall,
    plan: RoutingPlan,
    exchange: RingExchange | None,
    hop: int,
    first: int,
    last: int,
) -> list[tuple[int, int]]:
    """The rows of local experts ``first <= j < last`` of the rank whose slice is held."""
    owner = 0 if exchange is None else exchange.owner(hop)
    base = owner * call.shape.num_local_experts
    return plan.segments(base + first, base + last)
