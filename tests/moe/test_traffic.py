"""The bytes that each ring says it sends, against what the transport counted; and the choice."""

import pytest
import torch

from tests.moe.parity import run_relay
from tests.support.distributed import Job, run_jobs
from tests.support.moe_cases import MoeCase
from titan_relay.moe import RelayOptions, relay_ring
from titan_relay.moe.shapes import LayerShape
from titan_relay.moe.traffic import backward_traffic, forward_traffic


def shape_of(case):
    return LayerShape(
        case.num_ranks,
        case.num_tokens,
        case.dim,
        case.expert_dim,
        case.num_experts,
        case.top_k,
        case.dtype,
        has_biases=case.has_biases,
    )


JOBS = {
    f"{circulate}, {num_ranks} ranks, {name}": (
        MoeCase(num_ranks, num_experts=12, **keys),
        RelayOptions(circulate, num_slices=3, layer="layers.7"),
    )
    for num_ranks in (2, 3, 4)
    for circulate in ("experts", "tokens", "auto")
    for name, keys in {
        "one expert": {"skew": "one_expert"},
        "bfloat16 and biases": {"dtype": torch.bfloat16, "has_biases": True},
    }.items()
}


def counts(group, case, options):
    """What the transport counts in one pass, and after that has been taken."""
    telemetry = relay_ring(group).telemetry
    run_relay(case, group, options)
    return telemetry.take(), telemetry.counts()


@pytest.fixture(scope="module")
def counted():
    return run_jobs({name: Job(job[0].num_ranks, counts, job) for name, job in JOBS.items()}, 4)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("name", JOBS)
def test_announced_bytes_are_those_sent(name, operation, counted):
    case, options = JOBS[name]
    traffic = {"forward": forward_traffic, "backward": backward_traffic}[operation]
    announced = traffic(shape_of(case), options)
    for taken, left in counted[name]:
        of_call = taken["layers.7", operation]
        assert of_call.sent_bytes == getattr(announced, f"{announced.circulate}_bytes")
        assert of_call.num_calls == 1
        assert of_call.wait_seconds > 0
        assert left == {}


@pytest.mark.parametrize(
    ("expert_dim", "forward", "backward"),
    [(128, "experts", "experts"), (160, "experts", "tokens"), (512, "tokens", "tokens")],
)
def test_auto_takes_fewer_bytes_for_each_direction(expert_dim, forward, backward):
    # Tokens: 4096 * (2 * 256 * 4 + 64) = 8.7 MB forward, 4096 * (3 * 256 * 4 + 96) = 13.0 backward.
    # Experts: 16 * 3 * 256 * F * 4 = 6.3, 7.9 and 25.2 MB forward, twice that backward.
    shape = LayerShape(2, 4096, 256, expert_dim, 32, 8, torch.float32)
    assert forward_traffic(shape, RelayOptions()).circulate == forward
    assert backward_traffic(shape, RelayOptions()).circulate == backward


def test_max_tokens_per_rank_decides_instead_of_this_ranks_tokens():
    few = LayerShape(2, 10, 256, 128, 32, 8, torch.float32)
    many = LayerShape(2, 100_000, 256, 128, 32, 8, torch.float32)
    assert forward_traffic(few, RelayOptions()).circulate == "tokens"
    assert forward_traffic(many, RelayOptions()).circulate == "experts"


def test_one_rank_sends_nothing():
    shape = LayerShape(1, 64, 8, 8, 4, 2, torch.float32)
    for traffic in (forward_traffic, backward_traffic):
        decision = traffic(shape, RelayOptions())
        assert (decision.experts_bytes, decision.tokens_bytes) == (0, 0)


def test_equal_bytes_are_for_experts_whatever_the_number_of_ranks():
    """Then the work of a rank does not depend on the routing."""
    for num_ranks in (2, 3, 8):
        # Experts: 5 of 3 * 8 * 1 * 4 bytes. Tokens: 6 of 2 * 8 * 4 for x and out, 2 * (4 + 4) more.
        equal = LayerShape(num_ranks, 6, 8, 1, 5 * num_ranks, 2, torch.float32)
        traffic = forward_traffic(equal, RelayOptions())
        assert traffic.experts_bytes == traffic.tokens_bytes == 480 * (num_ranks - 1)
        assert traffic.circulate == "experts"
        fewer = LayerShape(num_ranks, 5, 8, 1, 5 * num_ranks, 2, torch.float32)
        assert forward_traffic(fewer, RelayOptions()).circulate == "tokens"
