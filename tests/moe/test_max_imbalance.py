"""A routing too uneven for a ring of tokens makes experts circulate, on all ranks alike."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.moe.parity import check_case, run_relay
from tests.moe.test_memory import TOLERANCE, expected, measure
from tests.moe.test_traffic import shape_of
from tests.support.distributed import run_ranks, subgroup
from tests.support.moe_cases import SKEWS, MoeCase
from titan_relay.moe import RelayOptions, RelayUsageError, relay_ring
from titan_relay.moe.ring_of_tokens import TokenRouting
from titan_relay.moe.traffic import circulations, forward_traffic

LIMIT = 1.3


def imbalance_of(case):
    """Rows of the busiest rank over the mean, from the ids themselves."""
    ids = torch.cat([case.data(rank).ids_TK.flatten() for rank in range(case.num_ranks)])
    per_rank = case.num_experts // case.num_ranks
    rows = [int((ids // per_rank == rank).sum()) for rank in range(case.num_ranks)]
    return max(rows) / (sum(rows) / case.num_ranks)


def _check_choice():
    seen = set()
    for num_ranks in (2, 3, 4):
        group = subgroup(range(num_ranks))
        if group is None:
            continue
        base = MoeCase(num_ranks, num_tokens=24, dim=12, expert_dim=40)
        options = RelayOptions(max_imbalance=LIMIT, layer="layers.3")
        assert forward_traffic(shape_of(base), options).circulate == "tokens"
        for skew in SKEWS:
            case = replace(base, skew=skew)
            turned = imbalance_of(case) > LIMIT
            seen.add(turned)
            check_case(case, group, options)
            relay_ring(group).telemetry.take()
            results = run_relay(case, group, options)
            for counts in relay_ring(group).telemetry.take().values():
                assert counts.num_experts_calls == int(turned), (case, counts)
            forced = run_relay(case, group, RelayOptions("experts" if turned else "tokens"))
            for name, result in results.items():
                assert torch.equal(result, forced[name]), (case, name)
        uneven = replace(base, tokens_by_rank=(0, 7, 2, 5))
        check_case(uneven, group, replace(options, max_tokens_per_rank=9))
        nothing = replace(base, num_tokens=0)
        check_case(nothing, group, options)
    dist.barrier()
    return seen


def test_the_routing_of_a_call_decides():
    assert set.union(*run_ranks(_check_choice, 4)) == {True, False}


def _check_memory():
    for num_ranks in (2, 3):
        group = subgroup(range(num_ranks))
        if group is None:
            continue
        # Tokens circulate, and take more memory than experts would.
        base = MoeCase(num_ranks, num_tokens=512, dim=64, expert_dim=160, num_experts=12)
        options = RelayOptions(max_imbalance=LIMIT)
        bounds = expected(base, options)
        for skew in ("balanced", "one_rank"):
            case = replace(base, skew=skew)
            peaks = measure(case, group, options)
            ring = "experts" if skew == "one_rank" else "tokens"
            for peak, bound, of_ring in zip(
                peaks, bounds, expected(case, RelayOptions(ring)), strict=True
            ):
                assert peak <= (1 + TOLERANCE) * bound
                assert peak == pytest.approx(max(of_ring, peaks[0]), rel=TOLERANCE)
    dist.barrier()


def test_memory_is_bounded_by_the_larger_of_both_rings():
    run_ranks(_check_memory, 3)


def test_imbalance_of_counts():
    # Two ranks, two slices, four experts; the second rank's two get 3 + 4 of 12 rows.
    routing = TokenRouting(None, [[[1, 0, 3, 0], [1, 1, 0, 0]], [[2, 0, 0, 0], [0, 0, 0, 4]]], 1, 2)
    assert routing.imbalance() == 7 / 6
    assert TokenRouting(None, [[[0, 0]], [[0, 0]]], 1, 1).imbalance() == 1.0


def test_only_tokens_turn():
    shape = shape_of(MoeCase(2, num_tokens=9999))
    weighs = RelayOptions(max_imbalance=LIMIT)
    assert circulations(forward_traffic(shape, weighs), weighs) == ("experts",)
    few = shape_of(MoeCase(2, num_tokens=2))
    assert circulations(forward_traffic(few, weighs), weighs) == ("tokens", "experts")
    assert circulations(forward_traffic(few, RelayOptions()), RelayOptions()) == ("tokens",)


def test_equal_numbers_are_equal_options():
    assert RelayOptions(max_imbalance=2).spec == RelayOptions(max_imbalance=2.0).spec


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_imbalance": 0.9}, "max_imbalance = 0.9 must be None or a number of at least 1"),
        ({"max_imbalance": float("nan")}, "must be None or a number of at least 1"),
        ({"max_imbalance": True}, "must be None or a number of at least 1"),
        ({"max_imbalance": "2"}, "must be None or a number of at least 1"),
        ({"max_imbalance": 2.0, "circulate": "tokens"}, "needs circulate = 'auto'"),
    ],
)
def test_wrong_limits(arguments, words):
    with pytest.raises(RelayUsageError, match=words):
        RelayOptions(**arguments)
