"""Transfers hide behind compute: a layer's time on links of known bandwidth and latency.

Time is virtual (``tests.support.virtual_ring``): products take a fixed time per multiply-add, links
exactly their latency and bandwidth, and each rank's clock is moved by nothing else.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.moe.virtual_layer import run_virtual
from tests.support.moe_cases import MoeCase
from tests.support.virtual_ring import VirtualWorld
from titan_relay.moe import RelayOptions

LATENCY_S = 0.5
# One second for a row's three products in the forward.
SECONDS_PER_MULTIPLY_ADD = 1 / (3 * MoeCase.dim * MoeCase.expert_dim)
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 3, 8


class TimedWorld(VirtualWorld):
    """Ranks whose products take time."""

    def on_rank(self, rank):
        return _Products(lambda seconds: self.advance(rank, seconds))


class _Products(TorchDispatchMode):
    def __init__(self, advance):
        super().__init__()
        self.advance = advance

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            *_, left, right = (arg for arg in args if isinstance(arg, torch.Tensor))
            self.advance(SECONDS_PER_MULTIPLY_ADD * left.numel() * right.shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ratio", [0.25, 4.0])
@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize("circulate", ["experts", "tokens"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_time_is_the_longer_of_compute_and_transfer_and_one_hop(
    num_ranks, circulate, num_slices, ratio
):
    case = MoeCase(num_ranks, num_tokens=48, num_experts=8, top_k=2, skew="even")
    options = RelayOptions(circulate, num_slices=num_slices)
    at_once = TimedWorld(num_ranks)
    run_virtual(case, options, at_once)
    compute_s = case.num_tokens * case.top_k * (1 + BACKWARD_PRODUCTS / FORWARD_PRODUCTS)
    assert at_once.clock_s == pytest.approx([compute_s] * num_ranks)
    # A bandwidth at which all transfers of forward and backward take ``ratio`` times the compute.
    bytes_per_s = at_once.sent_bytes[0] / (compute_s * ratio)
    world = TimedWorld(num_ranks, latency_s=LATENCY_S, bytes_per_s=bytes_per_s)
    results = run_virtual(case, options, world)
    total_s = max(result.forward_s + result.backward_s for result in results)
    transfer_s = world.sent_bytes[0] / bytes_per_s
    hops = num_ranks * num_slices * 2
    one_hop_s = (compute_s + 2 * transfer_s) / num_ranks
    bound_s = max(compute_s, transfer_s) + one_hop_s + (hops + 2) * LATENCY_S
    serial_s = compute_s + transfer_s
    assert total_s <= bound_s + 1e-6, (total_s, compute_s, transfer_s)
    if num_ranks == 4:
        # The bound is worth something: well below transfers that wait for compute.
        assert total_s < 0.95 * serial_s, (total_s, serial_s)


def test_transfers_start_before_the_compute_that_hides_them():
    """At W = 2 and transfers as long as a hop, the forward takes two hops and not three."""
    case = MoeCase(2, num_tokens=48, num_experts=8, top_k=2, skew="even")
    options = RelayOptions("experts", num_slices=1)
    hop_s = case.num_tokens * case.top_k / 2
    weights_bytes = 4 * 3 * case.dim * case.expert_dim * 4
    world = TimedWorld(2, bytes_per_s=weights_bytes / hop_s)
    results = run_virtual(case, options, world)
    assert results[0].forward_s == pytest.approx(2 * hop_s)
    # Backward: weights behind hop 0; the sum goes home after hop 1, with nothing left to hide it.
    backward_hop_s = hop_s * BACKWARD_PRODUCTS / FORWARD_PRODUCTS
    assert results[0].backward_s == pytest.approx(2 * backward_hop_s + hop_s)
