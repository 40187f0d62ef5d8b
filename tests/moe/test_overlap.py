"""Transfers hide behind compute: a layer's time on links of known bandwidth and latency.

Time is virtual (``tests.support.virtual_ring``): compute takes a fixed time per row, links exactly
their latency and bandwidth, and each rank's clock is moved by nothing else.
"""

import pytest

from tests.moe.virtual_layer import run_virtual
from tests.support.moe_cases import MoeCase
from tests.support.virtual_ring import VirtualWorld
from titan_relay.moe import RelayOptions
from titan_relay.moe import ring_of_experts as experts_backward
from titan_relay.moe import ring_of_experts as experts_forward
from titan_relay.moe import ring_of_tokens as tokens_backward
from titan_relay.moe import ring_of_tokens as tokens_forward

SECONDS_PER_ROW = 1.0
LATENCY_S = 0.5
ENTRIES = [
    (experts_forward, "forward_experts_"),
    (tokens_forward, "forward_experts_"),
    (experts_backward, "backward_experts_"),
    (tokens_backward, "backward_experts_"),
]


def run_timed(case, options, world, monkeypatch):
    for module, name in ENTRIES:
        real = getattr(module, name)

        def timed(*args, real=real):
            segments = next(a for a in args if isinstance(a, list) and a and len(a[0]) == 2)
            world.advance(SECONDS_PER_ROW * sum(end - start for start, end in segments))
            return real(*args)

        monkeypatch.setattr(module, name, timed)
    return run_virtual(case, options, world)


class EvenCase(MoeCase):
    """Every expert gets the same number of rows from every rank."""

    def _ids(self, rank, tokens, random):
        import torch

        ids = torch.arange(tokens * self.top_k) % self.num_experts
        return ids.view(tokens, self.top_k)


@pytest.mark.parametrize("ratio", [0.25, 4.0])
@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize("circulate", ["experts", "tokens"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_time_is_the_longer_of_compute_and_transfer_and_one_hop(
    num_ranks, circulate, num_slices, ratio, monkeypatch
):
    case = EvenCase(num_ranks, num_tokens=48, num_experts=8, top_k=2)
    options = RelayOptions(circulate, num_slices=num_slices)
    compute_s = SECONDS_PER_ROW * case.num_tokens * case.top_k
    dry = VirtualWorld(num_ranks)
    run_virtual(case, options, dry)
    # A bandwidth at which all transfers of forward and backward take ``ratio`` times the compute.
    bytes_per_s = dry.sent_bytes[0] / (2 * compute_s * ratio)
    world = VirtualWorld(num_ranks, latency_s=LATENCY_S, bytes_per_s=bytes_per_s)
    results = run_timed(case, options, world, monkeypatch)
    total_s = max(result["forward_s"] + result["backward_s"] for result in results)
    transfer_s = world.sent_bytes[0] / bytes_per_s
    hops = num_ranks * num_slices * 2
    one_hop_s = 2 * (compute_s + transfer_s) / num_ranks
    bound_s = max(2 * compute_s, transfer_s) + one_hop_s + (hops + 2) * LATENCY_S
    serial_s = 2 * compute_s + transfer_s
    assert total_s <= bound_s + 1e-6, (total_s, compute_s, transfer_s)
    if num_ranks == 4:
        # The bound is worth something: well below transfers that wait for compute.
        assert total_s < 0.95 * serial_s, (total_s, serial_s)


def test_transfers_start_before_the_compute_that_hides_them(monkeypatch):
    """At W = 2 and transfers as long as a hop, the forward takes two hops and not three."""
    case = EvenCase(2, num_tokens=48, num_experts=8, top_k=2)
    options = RelayOptions("experts", num_slices=1)
    hop_s = SECONDS_PER_ROW * case.num_tokens * case.top_k / 2
    weights_bytes = 4 * 3 * case.dim * case.expert_dim * 4
    world = VirtualWorld(2, bytes_per_s=weights_bytes / hop_s)
    results = run_timed(case, options, world, monkeypatch)
    assert results[0]["forward_s"] == pytest.approx(2 * hop_s)
    # Backward: weights behind hop 0; the sum goes home after hop 1, with nothing left to hide it.
    assert results[0]["backward_s"] == pytest.approx(3 * hop_s)
