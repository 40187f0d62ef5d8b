"""Ring of tokens: blocks of tokens circulate, weights stay.

At hop h this rank holds a block (a slice of the tokens: hidden states, scores, rows) of rank r - h.
It starts passing the block on to r + 1, and meanwhile computes the block's rows that are routed to
its own experts. A block's partial output travels the same way one hop behind (``circulation``)
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

import itertools
from collections.abc import Iterator, Sequence
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
from titan_relay.moe.circulation import Slices, Tensors, visits
from titan_relay.moe.routing import TokenSlices, rows_by_slice, segments
from titan_relay.moe.shapes import step_shape


@dataclass(frozen=True)
class TokenRouting:
    """The counts of every rank's slices and experts, known to all ranks."""

    slices: TokenSlices
    counts_WSE: Sequence[Sequence[Sequence[int]]]
    top_k: int
    num_local_experts: int

    @property
    def lengths_WS(self) -> list[list[int]]:
        """The number of tokens of each rank's slices."""
        return [
            [sum(counts_E) // self.top_k for counts_E in counts_SE] for counts_SE in self.counts_WSE
        ]

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
        bounds = [0, *itertools.accumulate(self.counts_WSE[owner][slice_index])]
        first = visited * self.num_local_experts
        return segments(bounds, first, first + self.num_local_experts)


def _visiting_blocks(
    call: RelayCall,
    per_token: Tensors,
    rows_N: torch.Tensor,
    routing: TokenRouting,
    result: Tensors,
) -> Iterator[tuple[RoutedTokens, Tensors, Tensors]]:
    """Per hop: a block with the rows for this rank's experts, what else of the tokens goes round,
    and where the block's sums are made, zeros at first."""
    top_k = call.shape.top_k
    rows_TK = rows_by_slice(rows_N, top_k, routing.slices).view(-1, top_k)
    slices = Slices(routing.lengths_WS, routing.slices.length)
    for visit in visits(call, "tokens", [*per_token, rows_TK], result, slices):
        x_tD, scores_tK, *others, rows_tK = visit.held
        mine = routing.segments(visit.owner, visit.slice_index, call.rank)
        share = [tensor.zero_() for tensor in visit.share]
        yield RoutedTokens(x_tD, scores_tK, rows_tK.view(-1), mine), others, share


def tokens_forward(
    call: RelayCall, tokens: RoutedTokens, routing: TokenRouting, weights: ExpertWeights
) -> torch.Tensor:
    """``out_TD``, in the dtype of ``x_TD``."""
    per_token = [tokens.x_TD.contiguous(), tokens.scores_TK.contiguous()]
    out_TD = torch.empty_like(per_token[0])
    step = step_shape(call.shape, call.options, out_TD.device, "tokens")
    workspace = forward_workspace(step)
    for routed, _, (out_tD,) in _visiting_blocks(call, per_token, tokens.rows_N, routing, [out_TD]):
        forward_experts_(out_tD, routed, weights, call.activation, workspace)
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
    per_token = [x_TD, scores_TK, dout_TD.contiguous()]
    dx_TD = torch.empty_like(x_TD) if wants.x else None
    dscores_TK = torch.empty_like(scores_TK) if wants.scores else None
    result = [tensor for tensor in (dx_TD, dscores_TK) if tensor is not None]
    dweights, sum_dtype = None, None
    if wants.weights:
        sum_dtype = call.options.sum_dtype(call.shape.dtype)
        dweights = weights.empty_like(weights.num_experts, sum_dtype)
    step = step_shape(call.shape, call.options, x_TD.device, "tokens")
    workspace = backward_workspace(step, sum_dtype)
    hops = _visiting_blocks(call, per_token, tokens.rows_N, routing, result)
    for number, (routed, (dout_tD,), share) in enumerate(hops):
        into = Gradients(
            share[0] if wants.x else None,
            share[-1] if wants.scores else None,
            dweights,
            accumulate_weights=number > 0,
        )
        backward_experts_(into, dout_tD, routed, weights, call.activation, workspace)
    if dweights is not None:
        dweights = dweights.map(lambda tensor: tensor.to(call.shape.dtype))
    return Gradients(dx_TD, dscores_TK, dweights)
