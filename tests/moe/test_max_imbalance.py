"""A routing too uneven for a ring of tokens makes experts circulate, on all ranks alike."""

from dataclasses import replace

import pytest
import torch

from tests.moe.parity import FLOAT32_TOLERANCE, errors_against_truth, run_relay
from tests.moe.test_memory import TOLERANCE, expected, measure
from tests.moe.test_traffic import shape_of
from tests.support.distributed import Job, run_jobs
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


OPTIONS = RelayOptions(max_imbalance=LIMIT, layer="layers.3")
BASES = {n: MoeCase(n, num_tokens=24, dim=12, expert_dim=40) for n in (2, 3, 4)}
CHOICES = {
    f"{num_ranks} ranks, {skew}": replace(base, skew=skew)
    for num_ranks, base in BASES.items()
    for skew in SKEWS
}
ODD = {
    f"{num_ranks} ranks, {name}": (replace(base, **changes), replace(OPTIONS, **keys))
    for num_ranks, base in BASES.items()
    for name, changes, keys in (
        ("unequal tokens", {"tokens_by_rank": (0, 7, 2, 5)}, {"max_tokens_per_rank": 9}),
        ("no tokens", {"num_tokens": 0}, {}),
    )
}
# Tokens circulate unless they turn, and take more memory than experts would.
LARGE = {
    f"{num_ranks} ranks, large, {skew}": MoeCase(
        num_ranks, num_tokens=512, dim=64, expert_dim=160, num_experts=12, skew=skew
    )
    for num_ranks in (2, 3)
    for skew in ("balanced", "one_rank")
}


def turns(case):
    return imbalance_of(case) > LIMIT


def choice(group, case, options=OPTIONS):
    """How often experts circulated, and which results differ from the same ring's by name."""
    telemetry = relay_ring(group).telemetry
    telemetry.take()
    results = run_relay(case, group, options)
    experts_calls = [counts.num_experts_calls for counts in telemetry.take().values()]
    forced = run_relay(case, group, RelayOptions("experts" if turns(case) else "tokens"))
    changed = [name for name, value in results.items() if not torch.equal(value, forced[name])]
    return experts_calls, changed


@pytest.fixture(scope="module")
def results():
    errors = ODD | {name: (case, OPTIONS) for name, case in CHOICES.items()}
    jobs = {
        f"errors, {name}": Job(job[0].num_ranks, errors_against_truth, job)
        for name, job in errors.items()
    }
    for name, case in CHOICES.items():
        jobs[name] = Job(case.num_ranks, choice, (case,))
    for num_ranks in BASES:
        job = (CHOICES[f"{num_ranks} ranks, one_rank"], replace(OPTIONS, max_imbalance=num_ranks))
        jobs[f"{num_ranks} ranks, at the limit"] = Job(num_ranks, choice, job)
    for name, case in LARGE.items():
        options = RelayOptions(max_imbalance=LIMIT)
        jobs[name] = Job(case.num_ranks, measure, (case, options))
    return run_jobs(jobs, 4)


@pytest.mark.parametrize("name", CHOICES)
def test_the_routing_of_a_call_decides(name, results):
    case = CHOICES[name]
    assert forward_traffic(shape_of(case), OPTIONS).circulate == "tokens"
    for experts_calls, changed in results[name]:
        assert experts_calls == [int(turns(case))] * 2
        assert changed == []


@pytest.mark.parametrize("num_ranks", BASES)
def test_tokens_go_round_up_to_the_limit(num_ranks, results):
    assert imbalance_of(CHOICES[f"{num_ranks} ranks, one_rank"]) == num_ranks
    for experts_calls, _ in results[f"{num_ranks} ranks, at the limit"]:
        assert experts_calls == [0, 0]


def test_both_decisions_are_among_them():
    assert {turns(case) for case in CHOICES.values()} == {True, False}


@pytest.mark.parametrize("name", [*CHOICES, *ODD])
def test_every_result_is_right_whatever_circulates(name, results):
    for errors in results[f"errors, {name}"]:
        assert max(errors.values()) < FLOAT32_TOLERANCE, errors


@pytest.mark.parametrize("name", LARGE)
def test_memory_is_bounded_by_the_larger_of_both_rings(name, results):
    case = LARGE[name]
    bounds = expected(case, RelayOptions(max_imbalance=LIMIT))
    of_ring = expected(case, RelayOptions("experts" if turns(case) else "tokens"))
    for peaks in results[name]:
        for peak, bound, wanted in zip(peaks, bounds, of_ring, strict=True):
            assert peak <= (1 + TOLERANCE) * bound
            assert peak == pytest.approx(max(wanted, peaks[0]), rel=TOLERANCE)


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
        ({"max_imbalance": 0.9}, "max_imbalance = 0.9: must be a finite number of at least 1"),
        ({"max_imbalance": float("nan")}, "must be a finite number of at least 1"),
        ({"max_imbalance": True}, "must be a finite number of at least 1"),
        ({"max_imbalance": "2"}, "must be a finite number of at least 1"),
        ({"max_imbalance": 2.0, "circulate": "tokens"}, 'needs circulate = "auto"'),
    ],
)
def test_wrong_limits(arguments, words):
    with pytest.raises(RelayUsageError, match=words):
        RelayOptions(**arguments)
