"""Both rings on 1 to 4 ranks: every result against the dense truth.

Every configuration runs in one group of ranks, after calls that were refused in it.
"""

import re

import pytest
import torch
import torch.distributed as dist

from tests.moe.parity import FLOAT32_TOLERANCE, errors_against_truth, run_relay
from tests.support.distributed import Job, run_jobs
from tests.support.moe_cases import SKEWS, MoeCase
from titan_relay.moe import RelayOptions, RelayUsageError, SwiGLU

WORLD_SIZE = 4
RINGS = ("experts", "tokens")
CLAMPED = SwiGLU(alpha=1.702, limit=0.6, up_offset=1.0)


def cases(num_ranks):
    """Names, cases and what their options say."""
    base = {"num_ranks": num_ranks, "num_experts": 12}
    for skew in SKEWS:
        yield skew, MoeCase(**base, skew=skew), {}
    for slices in (1, 2, 3, 100):
        yield f"{slices} slices", MoeCase(**base), {"num_slices": slices, "max_rows_per_step": 3}
    # Edge of tiles, more choices than a rank has experts, and wider than deep.
    tiles = {"num_tokens": 64, "dim": 64, "expert_dim": 96}
    tiles["num_experts"] = 8 + 4 * (num_ranks == 3)
    for name, changes in {
        "no tokens": {"num_tokens": 0},
        "one token": {"num_tokens": 1},
        "one expert a rank": {"top_k": 1, "num_experts": num_ranks},
        "all experts chosen": {"top_k": 12},
        "odd sizes": {"num_tokens": 31, "dim": 7, "expert_dim": 5},
        "biases": {"has_biases": True, "skew": "zipf"},
        "tiles": tiles,
    }.items():
        yield name, MoeCase(**{**base, **changes}), {"num_slices": 2}


def parity_jobs():
    for num_ranks in range(1, WORLD_SIZE + 1):
        for circulate in RINGS:
            for name, case, keys in cases(num_ranks):
                arguments = (case, RelayOptions(circulate, **keys))
                yield f"{circulate}, {num_ranks} ranks, {name}", arguments
            case = MoeCase(num_ranks, num_experts=12, has_biases=True)
            arguments = (case, RelayOptions(circulate, num_slices=2), CLAMPED)
            yield f"{circulate}, {num_ranks} ranks, clamped", arguments
        for tokens in ((5, 3, 3, 4), (0, 7, 2, 0), (1, 0, 0, 0)):
            case = MoeCase(num_ranks, num_experts=12, tokens_by_rank=tokens)
            for circulate in (*RINGS, "auto"):
                for slices in ("auto", 1, 3):
                    options = RelayOptions(circulate, num_slices=slices, max_tokens_per_rank=9)
                    name = f"{circulate}, {num_ranks} ranks, {tokens} tokens, {slices} slices"
                    yield name, (case, options)


def refusals():
    """By name a case, each rank's options, and what the error says."""
    for num_ranks in range(2, WORLD_SIZE + 1):
        uneven = MoeCase(num_ranks, num_experts=12, tokens_by_rank=(5, 3, 3, 4))
        for circulate in (*RINGS, "auto"):
            where = f"{circulate}, {num_ranks} ranks"
            options = [RelayOptions(circulate)]
            message = r"number of tokens T must be equal.*\[5, 3"
            yield f"{where}, uneven", (uneven, options, message)
            options = [RelayOptions(circulate, max_tokens_per_rank=4)]
            message = "max_tokens_per_rank = 4 is less"
            yield f"{where}, too many tokens", (uneven, options, message)
        options = [RelayOptions("experts"), *[RelayOptions("tokens")] * (num_ranks - 1)]
        message = r"RelayOptions\.\w+ must be equal on all ranks"
        case = MoeCase(num_ranks, num_experts=12)
        yield f"{num_ranks} ranks, different rings", (case, options, message)


def refusal(group, case, options):
    """What this rank is told, with its own of ``options``, or the only one."""
    try:
        run_relay(case, group, options[dist.get_rank(group) % len(options)])
    except RelayUsageError as error:
        return str(error)
    return "nothing"


def changed_bits(group, case, options):
    """Names of the results that a second run gives otherwise."""
    first, second = run_relay(case, group, options), run_relay(case, group, options)
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


PARITY, REFUSALS = dict(parity_jobs()), dict(refusals())
TWICE = {
    f"twice, {circulate}, {dtype}": (
        MoeCase(3, num_tokens=40, num_experts=12, top_k=4, dtype=dtype),
        RelayOptions(circulate, num_slices=2),
    )
    for circulate in RINGS
    for dtype in (torch.float32, torch.bfloat16)
}


@pytest.fixture(scope="module")
def results():
    jobs = {
        name: Job(case.num_ranks, refusal, (case, options))
        for name, (case, options, _) in REFUSALS.items()
    }
    for name, arguments in PARITY.items():
        jobs[name] = Job(arguments[0].num_ranks, errors_against_truth, arguments)
    for name, arguments in TWICE.items():
        jobs[name] = Job(arguments[0].num_ranks, changed_bits, arguments)
    return run_jobs(jobs, WORLD_SIZE)


@pytest.mark.parametrize("name", REFUSALS)
def test_disagreement_is_the_same_error_on_every_rank(name, results):
    *_, message = REFUSALS[name]
    told = results[name]
    assert re.search(message, told[0])
    assert told == [told[0]] * len(told)


@pytest.mark.parametrize("name", PARITY)
def test_every_result_matches_the_truth(name, results):
    assert len(results[name]) == PARITY[name][0].num_ranks
    for rank, errors in enumerate(results[name]):
        assert max(errors.values()) < FLOAT32_TOLERANCE, (rank, errors)


@pytest.mark.parametrize("name", TWICE)
def test_two_runs_give_identical_bits(name, results):
    assert results[name] == [[], [], []]
