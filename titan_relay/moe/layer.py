"""One layer's forward and backward on one rank: check, choose the ring, run it.

Below the registered ops and without autograd; given a ``RelayCall``, which may hold a simulated
ring.
"""

import torch

from relay_kernels import ExpertWeights, Gradients, RoutedTokens
from titan_relay.moe.call import RelayCall, Wants
from titan_relay.moe.cross_rank_checks import check_across_ranks, find_fault, gather_counts
from titan_relay.moe.ring_of_experts import experts_backward, experts_forward
from titan_relay.moe.ring_of_tokens import TokenRouting, tokens_backward, tokens_forward
from titan_relay.moe.shapes import token_slices
from titan_relay.moe.traffic import Traffic, backward_traffic, forward_traffic


def layer_forward(
    call: RelayCall, tokens: RoutedTokens, counts: torch.Tensor, weights: ExpertWeights
) -> torch.Tensor:
    """``out_TD``. ``tokens`` has the rows of every expert, ``counts`` is ``sort_rows``'s."""
    fault = find_fault(tokens, counts, check_finite=call.options.check_finite)
    check_across_ranks(call, tokens.x_TD.shape[0], fault)
    routing = _token_routing(call, forward_traffic(call.shape, call.options), counts)
    if routing is None:
        return experts_forward(call, tokens, weights)
    return tokens_forward(call, tokens, routing, weights)


def layer_backward(
    call: RelayCall,
    wants: Wants,
    dout_TD: torch.Tensor,
    tokens: RoutedTokens,
    counts: torch.Tensor,
    weights: ExpertWeights,
) -> Gradients:
    """The gradients asked for; the same arguments as the forward's, and its output's gradient."""
    routing = _token_routing(call, backward_traffic(call.shape, call.options), counts)
    if routing is None:
        return experts_backward(call, wants, dout_TD, tokens, weights)
    return tokens_backward(call, wants, dout_TD, tokens, routing, weights)


def _token_routing(call: RelayCall, traffic: Traffic, counts: torch.Tensor) -> TokenRouting | None:
    """Every rank's counts, exchanged on the host, if tokens circulate; None if experts do."""
    if traffic.circulate == "experts":
        return None
    shape = call.shape
    routing = TokenRouting(
        token_slices(shape.num_tokens, shape.num_ranks, call.options),
        gather_counts(call, counts),
        shape.top_k,
        shape.num_local_experts,
    )
    limit = call.options.max_imbalance
    return None if limit is not None and routing.imbalance() > limit else routing
