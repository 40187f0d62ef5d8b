"""The bytes that each ring says it sends, against what the transport counted; and the choice."""

import pytest
import torch
import torch.distributed as dist

from tests.moe.parity import run_relay
from tests.support.distributed import run_ranks, subgroup
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


def _check_counted_bytes():
    for num_ranks in (2, 3, 4):
        group = subgroup(range(num_ranks))
        if group is None:
            continue
        for case in (
            MoeCase(num_ranks, num_experts=12, skew="one_expert"),
            MoeCase(num_ranks, num_experts=12, dtype=torch.bfloat16, has_biases=True),
        ):
            for circulate in ("experts", "tokens", "auto"):
                options = RelayOptions(circulate, num_slices=3, layer="layers.7")
                relay_ring(group).telemetry.take()
                run_relay(case, group, options)
                counts = relay_ring(group).telemetry.take()
                for operation, traffic in (
                    ("forward", forward_traffic(shape_of(case), options)),
                    ("backward", backward_traffic(shape_of(case), options)),
                ):
                    expected = getattr(traffic, f"{traffic.circulate}_bytes")
                    counted = counts["layers.7", operation]
                    assert counted.sent_bytes == expected, (case, circulate, operation)
                    assert counted.num_calls == 1
                    assert counted.wait_seconds > 0
        assert relay_ring(group).telemetry.counts() == {}
    dist.barrier()


def test_announced_bytes_are_those_sent():
    run_ranks(_check_counted_bytes, 4)


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
