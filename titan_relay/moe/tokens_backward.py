"""Ring of tokens, backward: blocks circulate again, their gradients follow one hop behind.

A block now also carries its output's gradient, and its input and score gradients come home like the
forward's partial outputs. Weight gradients never travel: this rank sees every token that is routed
to its experts, and sums in ``options.grad_dtype``.

Sent per rank: ``(W - 1) * T`` tokens, three times their hidden states (x, dout, dx), scores, score
gradients and rows. Buffers: two blocks of x and dout, three of dx (at W = 2 one and two); and where
gradients are summed in another dtype than the weights', this rank's gradients in it.

Shape legend: T tokens of this rank, t of a block, K top-k, D model dimension, e local experts.
"""

import torch

from relay_kernels import ExpertWeights, Gradients, backward_experts_, backward_workspace
from titan_relay.moe.call import RelayCall, Wants
from titan_relay.moe.homeward_chain import HomewardChain, Tensors
from titan_relay.moe.routing import RoutingPlan, rows_by_slice
from titan_relay.moe.tokens_ring import BlockBuffers, TokenRouting


def tokens_backward(
    call: RelayCall,
    wants: Wants,
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    plan: RoutingPlan,
    routing: TokenRouting,
    weights: ExpertWeights,
) -> Gradients:
    """The gradients asked for."""
    x_TD, scores_TK, dout_TD = x_TD.contiguous(), scores_TK.contiguous(), dout_TD.contiguous()
    slices = routing.slices
    rows = rows_by_slice(plan, call.shape.top_k, slices, x_TD.shape[0])
    dx_TD = torch.empty_like(x_TD) if wants.x else None
    dscores_TK = torch.empty_like(scores_TK) if wants.scores else None
    dweights, sum_dtype = None, None
    if wants.weights:
        sum_dtype = call.options.sum_dtype(call.shape.dtype)
        dweights = weights.empty_like(weights.num_experts, sum_dtype)
    chain = HomewardChain(call.num_ranks, _given(dx_TD, dscores_TK), slices.length)
    blocks = BlockBuffers.like(call, [x_TD, scores_TK, dout_TD, rows[0]], slices.length)
    workspace = backward_workspace(call.step_shape(slices.length, x_TD.device), sum_dtype)
    exchange = call.exchange()
    for index in range(slices.num):
        first, last = slices.bounds(index, x_TD.shape[0])
        held = [x_TD[first:last], scores_TK[first:last], dout_TD[first:last], rows[index]]
        for hop in range(call.num_ranks):
            owner = call.owner(hop)
            num_tokens = routing.num_tokens(owner, index)
            arriving = blocks.post(
                exchange, held, hop, routing.num_tokens(call.owner(hop + 1), index)
            )
            chain.post(exchange, hop, num_tokens)
            start = first if hop == 0 else 0
            share = [tensor.zero_() for tensor in chain.share(hop, start, start + num_tokens)]
            call.commit(exchange, index, hop)
            x_tD, scores_tK, dout_tD, rows_n = held
            backward_experts_(
                Gradients(
                    share[0] if wants.x else None,
                    share[-1] if wants.scores else None,
                    dweights,
                    accumulate_weights=index > 0 or hop > 0,
                ),
                dout_tD,
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
    if dweights is not None:
        dweights = dweights.map(lambda tensor: tensor.to(call.shape.dtype))
    return Gradients(dx_TD, dscores_TK, dweights)


def _given(*tensors: torch.Tensor | None) -> Tensors:
    return [tensor for tensor in tensors if tensor is not None]
