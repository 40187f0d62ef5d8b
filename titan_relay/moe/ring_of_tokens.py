"""Ring of tokens: blocks of tokens circulate, weights stay.

At hop h this rank holds a block (a slice of the tokens: hidden states, scores, rows) of rank r - h.
It starts passing the block on to r + 1, and meanwhile computes the block's rows that are routed to
its own experts. A block's partial output travels the same way one hop behind (``homeward_chain``)
and ends at home, where the home rank's own part is added last. In backward a block also carries its
output's gradient, and its input and score gradients come home like the forward's partial outputs.
Weight gradients never travel: this rank sees every token that is routed to its experts, and sums in
``options.grad_dtype``.

Sent per rank: ``(W - 1) * T`` tokens, forward twice their hidden states, backward three times (x,
dout, dx), and scores, score gradients and rows. Buffers: two blocks of what goes round and three of
what comes home (at W = 2 one and two); and in backward, where gradients are summed in another dtype
than the weights', this rank's gradients in it. A rank computes the rows routed to its experts, so
the hottest rank sets the pace.

Shape legend: T tokens of this rank, t tokens of a block, K top-k, n = t * K rows of a block, W
ranks, S slices, E experts, e experts of this rank, D model dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relay_kernels import (
    ExpertWeights,
    Gradients,
    RoutedTokens,
    Segment,
    backward_experts_,
    backward_workspace,
    forward_experts_,
    forward_workspace,
)
from titan_relay.moe.call import RelayCall, Wants
from titan_relay.moe.homeward_chain import HomewardChain, Tensors
from titan_relay.moe.routing import TokenSlices, rows_by_slice, segments
from titan_relay.moe.transport import RingExchange


@dataclass(frozen=True)
class TokenRouting:
    """The counts of every rank's slices and experts, known to all ranks."""

    slices: TokenSlices
    counts_WSE: Sequence[Sequence[Sequence[int]]]
    top_k: int
    num_local_experts: int

    def num_tokens(self, rank: int, slice_index: int) -> int:
        return sum(self.counts_WSE[rank][slice_index]) // self.top_k

    def imbalance(self) -> float:
        """Rows of the rank whose experts get the most, over the mean; 1 without rows."""
        slices = [counts_E for counts_SE in self.counts_WSE for counts_E in counts_SE]
        totals_E = [sum(counts) for counts in zip(*slices, strict=True)]
        share = self.num_local_experts
        received = [
            sum(totals_E[first : first + share]) for first in range(0, len(totals_E), share)
        ]
        return max(received) * len(received) / sum(received) if sum(received) else 1.0

    def segments(self, owner: int, slice_index: int, visited: int) -> list[Segment]:
        """The rows of ``owner``'s block that go to the experts of rank ``visited``."""
        bounds = [0]
        for count in self.counts_WSE[owner][slice_index]:
            bounds.append(bounds[-1] + count)
        first = visited * self.num_local_experts
        return segments(bounds, first, first + self.num_local_experts)


@dataclass(frozen=True)
class BlockBuffers:
    """Receive buffers for visiting blocks: the one in use and the one arriving."""

    buffers: list[Tensors]
    top_k: int

    @staticmethod
    def like(call: RelayCall, own: Tensors, length: int) -> "BlockBuffers":
        """Buffers for blocks of up to ``length`` tokens; ``own`` are x, rows and what else goes.

        A block's rows come last and are ``K`` per token.
        """
        *per_token, rows_n = own

        def buffer() -> Tensors:
            tensors = [tensor.new_empty((length, *tensor.shape[1:])) for tensor in per_token]
            return [*tensors, rows_n.new_empty(length * call.shape.top_k)]

        return BlockBuffers(
            [buffer() for _ in range(num_block_buffers(call.num_ranks))], call.shape.top_k
        )

    def view(self, index: int, num_tokens: int) -> Tensors:
        *per_token, rows_n = self.buffers[index]
        return [*(tensor[:num_tokens] for tensor in per_token), rows_n[: num_tokens * self.top_k]]

    def post(
        self, exchange: RingExchange | None, held: Tensors, hop: int, next_num_tokens: int
    ) -> Tensors | None:
        """Queue passing ``held`` on; where the next block arrives, or None at the last hop.

        Both sides know the length of every block, so messages have exactly that length.
        """
        if exchange is None or hop == exchange.size - 1:
            return None
        arriving = self.view(hop % 2, next_num_tokens)
        exchange.send(held)
        exchange.receive(arriving)
        return arriving


def num_block_buffers(num_ranks: int) -> int:
    return min(2, num_ranks - 1)


def tokens_forward(
    call: RelayCall, tokens: RoutedTokens, routing: TokenRouting, weights: ExpertWeights
) -> torch.Tensor:
    """``out_TD``, in the dtype of ``x_TD``."""
    x_TD, scores_TK = tokens.x_TD.contiguous(), tokens.scores_TK.contiguous()
    slices = routing.slices
    rows = rows_by_slice(tokens.rows_N, call.shape.top_k, slices, x_TD.shape[0])
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
            mine = routing.segments(owner, index, call.rank)
            routed = RoutedTokens(x_tD, scores_tK, rows_n, mine)
            forward_experts_(out_tD.zero_(), routed, weights, call.activation, workspace)
            call.wait(exchange)
            chain.settle(hop)
            held = arriving or held
    chain.bring_home(call, exchange, slices.num - 1)
    call.finish(exchange, "tokens")
    return out_TD


def tokens_backward(
    call: RelayCall,
    wants: Wants,
    dout_TD: torch.Tensor,
    tokens: RoutedTokens,
    routing: TokenRouting,
    weights: ExpertWeights,
) -> Gradients:
    """The gradients asked for."""
    x_TD, scores_TK = tokens.x_TD.contiguous(), tokens.scores_TK.contiguous()
    dout_TD, slices = dout_TD.contiguous(), routing.slices
    rows = rows_by_slice(tokens.rows_N, call.shape.top_k, slices, x_TD.shape[0])
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
            mine = routing.segments(owner, index, call.rank)
            routed = RoutedTokens(x_tD, scores_tK, rows_n, mine)
            into = Gradients(
                share[0] if wants.x else None,
                share[-1] if wants.scores else None,
                dweights,
                accumulate_weights=index > 0 or hop > 0,
            )
            backward_experts_(into, dout_tD, routed, weights, call.activation, workspace)
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
