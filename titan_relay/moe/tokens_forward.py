"""Ring of tokens, forward: blocks of tokens circulate, weights stay.

At hop h this rank holds a block (a slice of the tokens: hidden states, scores, rows) of rank r - h.
It starts passing the block on to r + 1, and meanwhile computes the block's rows that are routed to
its own experts. A block's partial output travels the same way one hop behind (``homeward_chain``)
and ends at home, where the home rank's own part is added last.

Sent per rank: ``(W - 1) * T`` tokens, twice their hidden states, and scores and rows. Buffers: two
token blocks and three output blocks (at W = 2 one and two). A rank computes the rows routed to its
experts, so the hottest rank sets the pace.

Shape legend: T tokens of this rank, K top-k, D model dimension, e experts of this rank.
"""

import torch

from relay_kernels import ExpertWeights, forward_experts_, forward_workspace
from titan_relay.moe.call import RelayCall
from titan_relay.moe.homeward_chain import HomewardChain
from titan_relay.moe.routing import RoutingPlan, rows_by_slice
from titan_relay.moe.tokens_ring import BlockBuffers, TokenRouting


def tokens_forward(
    call: RelayCall,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    plan: RoutingPlan,
    routing: TokenRouting,
    weights: ExpertWeights,
) -> torch.Tensor:
    """``out_TD``, in the dtype of ``x_TD``."""
    x_TD, scores_TK = x_TD.contiguous(), scores_TK.contiguous()
    slices = routing.slices
    rows = rows_by_slice(plan, call.shape.top_k, slices, x_TD.shape[0])
    out_TD = torch.empty_like(x_TD)
    chain = HomewardChain(call.num_ranks, [out_TD], slices.length)
    blocks = BlockBuffers.like(call, [x_TD, scores_TK, rows[0]], slices.length)
    workspace = forward_workspace(call.step_shape(slices.length, x_TD.device))
    exchange = call.exchange()
    for index in range(slices.num):
        first, last = slices.bounds(index, x_TD.shape[0])
        held = [x_TD[first:last], scores_TK[first:last], rows[index]]
        for hop in range(call.num_ranks):
            owner = call.owner(hop)
            num_tokens = routing.num_tokens(owner, index)
            arriving = blocks.post(
                exchange, held, hop, routing.num_tokens(call.owner(hop + 1), index)
            )
            chain.post(exchange, hop, num_tokens)
            start = first if hop == 0 else 0
            (out_tD,) = chain.share(hop, start, start + num_tokens)
            call.commit(exchange, index, hop)
            x_tD, scores_tK, rows_n = held
            forward_experts_(
                out_tD.zero_(),
                x_tD,
                scores_tK,
                rows_n,
                routing.segments(owner, index, call.rank),
                weights,
                call.activation,
                workspace,
            )
            call.wait(exchange)
            chain.settle(hop)
            held = arriving or held
    chain.bring_home(call, exchange, slices.num - 1)
    call.finish(exchange, "tokens")
    return out_TD
