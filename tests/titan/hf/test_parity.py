"""Every family computes what transformers computes: logits, loss and every parameter's gradient.

`pytest tests -k hf_parity -s` prints the largest difference of each family and layout.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest

from tests.support.distributed import run_ranks
from tests.titan.hf.cases import CASES, Case
from tests.titan.hf.ranks import Differences, Job, Layout, compare_all
from tests.titan.hf.reference import NUM_ROWS, write_reference
from tests.titan.runs import a_run, config_file, layout, write_data
from titan_relay.config.schema_model import FamilyName

# Float32 sums in another order. Differences are relative to a tensor's largest value.
TOLERANCE = 1e-5


def _layout(name: str, relay: dict[str, str], **degrees: int) -> Layout:
    rows = {"training__local_batch_size": NUM_ROWS // degrees.get("dp", 1)}
    settings = layout(**degrees) | rows | {f"relay__{k}": v for k, v in relay.items()}
    return Layout(name, a_run(name, **settings, training__global_batch_size=NUM_ROWS).settings)


ONE_RANK = [
    _layout("one rank, relay", {}),
    _layout("one rank, all-to-all", {"dispatcher": "alltoall"}),
]
TWO_RANKS = [
    _layout("ep 2, experts circulate", {"circulate": "experts"}, dp=2, ep=2),
    _layout("ep 2, tokens circulate", {"circulate": "tokens"}, dp=2, ep=2),
    _layout("ep 2, all-to-all", {"dispatcher": "alltoall"}, dp=2, ep=2),
    _layout("cp 2", {}, cp=2),
    _layout("tp 2", {}, tp=2),
    _layout("tp 2, ep 2", {}, tp=2, ep=2),
]


def _fits(case: Case, layout: Layout) -> bool:
    """Tensor parallelism cuts heads, which an odd number of them does not allow."""
    heads = math.gcd(case.model["num_heads"], case.model.get("num_kv_heads") or 0)
    return heads % dict(layout.settings)["parallelism.tensor_parallel_degree"] == 0


def _jobs(layouts: list[Layout]) -> list[Job]:
    return [
        Job(index, case, layout)
        for index, case in enumerate(CASES)
        for layout in layouts
        if _fits(case, layout)
    ]


JOBS = _jobs(ONE_RANK) + _jobs(TWO_RANKS)


def _mistakes() -> dict[str, Job]:
    """Models with one number that is wrong, by what is wrong."""
    wrong = {
        "norm_eps": lambda eps: 10 * eps,
        "mla.latent_norm_eps": lambda eps: 10 * eps,
        "rope_theta": lambda theta: 1.1 * theta,
        "moe.route_norm": lambda route_norm: not route_norm,
        "moe.route_scale": lambda scale: 1.001 * scale,
        "moe.router_jitter": lambda jitter: 1.5 * jitter,
        "longrope.short_mscale": lambda mscale: 1.001 * mscale,
    }
    jobs = {}
    for index, case in enumerate(CASES):
        for key, change in wrong.items():
            if key not in case.model or (case.family, key) == ("phimoe", "moe.route_norm"):
                continue
            model = case.model | {key: change(case.model[key])}
            job = Job(index, replace(case, name=f"{key} is wrong", model=model), ONE_RANK[0])
            jobs.setdefault(str(job), job)  # the first model of each family
    return jobs


MISTAKES = _mistakes()


def _asked(request: pytest.FixtureRequest) -> set[str]:
    """Names of the jobs of this module's selected tests; the table asks for all."""
    tests = [item for item in request.session.items if item.path == request.path]
    if any(item.name == test_hf_parity_table.__name__ for item in tests):
        return {*map(str, JOBS), *MISTAKES}
    return {str(value) for item in tests for value in item.callspec.params.values()}


@pytest.fixture(scope="module")
def differences(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Differences]:
    """Differences by job, the largest of all ranks; of the jobs that selected tests ask for."""
    asked = _asked(request)
    folder = tmp_path_factory.mktemp("hf")
    write_data(folder)
    config_file(folder)
    for index, case in enumerate(CASES):
        write_reference(folder / str(index), case, seed=index)
    one_rank = [job for job in (*_jobs(ONE_RANK), *MISTAKES.values()) if str(job) in asked]
    found = run_ranks(compare_all, 1, str(folder), one_rank)[0]
    two_ranks = [job for job in _jobs(TWO_RANKS) if str(job) in asked]
    by_rank = run_ranks(compare_all, 2, str(folder), two_ranks)
    return found | {
        key: max((each[key] for each in by_rank), key=Differences.largest) for key in by_rank[0]
    }


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_hf_parity(job: Job, differences: dict[str, Differences]) -> None:
    found = differences[str(job)]
    assert found.logits < TOLERANCE
    assert found.loss < TOLERANCE
    assert {name: diff for name, diff in found.grads.items() if not diff < TOLERANCE} == {}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_hf_parity_notices(mistake: str, differences: dict[str, Differences]) -> None:
    """One number that is a little wrong stands out from rounding."""
    assert differences[mistake].largest()[0] > 2 * TOLERANCE


def test_hf_parity_table(
    differences: dict[str, Differences], capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints the largest difference of each family and layout; the judgement is above."""
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for job in JOBS:
        key, found = (job.case.family, job.layout.name), differences[str(job)].largest()
        worst[key] = max(worst.get(key, found), found)
    with capsys.disabled():
        print()
        for (family, layout), (difference, name) in worst.items():
            print(f"{family:10} {layout:24} {difference:.1e}  {name}")
    assert {family for family, _ in worst} == set(get_args(FamilyName))
