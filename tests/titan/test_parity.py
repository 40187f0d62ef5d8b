"""Every way of spreading a run over ranks trains the same model as one rank does."""

from pathlib import Path

import pytest

from tests.support.distributed import run_ranks
from tests.titan.runs import Run, a_run, config_file, layout, train_all, write_data

REFERENCE = "one rank"

ONE_RANK = [
    a_run(REFERENCE, **layout()),
    a_run("gradient accumulation", **layout() | {"training__local_batch_size": 2}),
    a_run("all-to-all on one rank", **layout(), relay__dispatcher="alltoall"),
]
FOUR_RANKS = [
    a_run("all-to-all, dp 2 cp 2 ep 4", **layout(dp=2, cp=2, ep=4), relay__dispatcher="alltoall"),
    a_run("relay, dp 2 cp 2 ep 4", **layout(dp=2, cp=2, ep=4)),
    a_run("relay, dp 4 ep 2 (efsdp 2)", **layout(dp=4, ep=2)),
    a_run("accumulation", **layout(dp=4, ep=4) | {"training__local_batch_size": 1}),
    a_run("relay, cp 4 ep 4", **layout(cp=4, ep=4)),
    a_run("no ep, dp 4", **layout(dp=4)),
    a_run("HSDP, rep 2 dp 2 ep 2", **layout(rep=2, dp=2, ep=2)),
    a_run("tensor parallel, dp 2 tp 2 ep 2", **layout(dp=2, tp=2, ep=2)),
    a_run("tensor parallel, dp 2 tp 2 ep 4", **layout(dp=2, tp=2, ep=4)),
    a_run("pipeline, dp 2 pp 2 ep 2", **layout(dp=2, pp=2, ep=2)),
    a_run("full recompute", **layout(dp=2, cp=2, ep=4), activation_checkpoint__mode="full"),
    a_run("selective", **layout(dp=2, cp=2, ep=4), activation_checkpoint__mode="selective"),
    a_run("chunked loss", **layout(dp=2, cp=2, ep=4), loss__name="chunked_cross_entropy"),
]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of all runs, as the ranks that report losses saw them."""
    folder = tmp_path_factory.mktemp("parity")
    write_data(folder)
    config_file(folder)
    found = _train(folder, 1, ONE_RANK)
    return found | _train(folder, 4, FOUR_RANKS)


def _train(folder: Path, world_size: int, runs: list[Run]) -> dict[str, list[float]]:
    by_rank = run_ranks(train_all, world_size, str(folder), runs, timeout_s=500.0)
    # The last rank is on the last pipeline stage, which has the loss.
    return by_rank[-1]


@pytest.mark.parametrize("name", [run.name for run in ONE_RANK[1:] + FOUR_RANKS])
def test_losses_equal_those_of_one_rank(name: str, losses: dict[str, list[float]]) -> None:
    assert len(losses[name]) == 6
    # Float32 sums in another order: seen up to 1e-6 after six steps.
    assert losses[name] == pytest.approx(losses[REFERENCE], rel=1e-5)


def test_the_runs_learn(losses: dict[str, list[float]]) -> None:
    assert losses[REFERENCE][-1] < losses[REFERENCE][0] - 0.1
