"""Tokens of the whole run in checkpoints, older ones too, and losses that are not finite; others
are in test_curves."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.support.distributed import run_ranks
from titan_relay.titan.metrics.rows import RowCurves
from titan_relay.titan.model.finite import SkippedSteps

TOKENS_PER_STEP = 8 * 64


def rows_of(num_groups: int, cp: int = 1) -> RowCurves:
    """On rank 0 of so many ranks that share no rows, each in `cp` parts."""
    mesh = SimpleNamespace(get_local_rank=lambda: 0, size=lambda: num_groups)
    dims = SimpleNamespace(get_optional_mesh=lambda name: mesh if num_groups > 1 else None, cp=cp)
    return RowCurves(
        dims, has_loss=True, tokens_per_step=TOKENS_PER_STEP, device=torch.device("cpu")
    )


def train(rows: RowCurves, num_steps: int, num_groups: int, cp: int = 1) -> None:
    for _ in range(num_steps):
        rows.begin_step(is_reported=False)
        rows.add_labels(torch.zeros(8 // num_groups, 64 // cp, dtype=torch.int64))


@pytest.mark.parametrize(("num_groups", "cp"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_a_checkpoint_keeps_the_tokens_of_all_ranks(num_groups: int, cp: int) -> None:
    rows = rows_of(num_groups, cp)
    train(rows, 3, num_groups, cp)
    assert rows.saved_tokens() == "1536 of all ranks"
    resumed = rows_of(1)
    resumed.load_tokens(rows.saved_tokens(), step=3)
    train(resumed, 1, 1)
    assert resumed.saved_tokens() == "2048 of all ranks"


def test_steps_of_another_global_batch_stay_counted() -> None:
    rows = rows_of(2)
    rows.load_tokens("1001 of all ranks", step=7)
    train(rows, 1, 2)
    assert rows.saved_tokens() == "1513 of all ranks"


@pytest.mark.parametrize("of_one_rank", [512, 896, 1280])
def test_an_older_checkpoints_number_of_one_rank_gives_way_to_its_steps(of_one_rank: int) -> None:
    rows = rows_of(2)
    rows.load_tokens(of_one_rank, step=4)
    assert rows.saved_tokens() == "2048 of all ranks"


@pytest.mark.parametrize("num_skipped", [0, 1, 27])
def test_skipped_steps_are_kept_behind_the_tokens(num_skipped: int) -> None:
    rows = rows_of(1)
    train(rows, 2, 1)
    saved = rows.saved_tokens() + SkippedSteps(most=30, count=num_skipped).saved()
    resumed, skipped = rows_of(1), SkippedSteps(most=30)
    resumed.load_tokens(saved, step=2)
    skipped.load(saved)
    assert resumed.saved_tokens() == rows.saved_tokens() == "1024 of all ranks"
    assert skipped.count == num_skipped
    skipped.load(1024)  # what an older checkpoint kept
    assert skipped.count == 0


def curves_of_bad_losses() -> list[dict[str, float]]:
    found = []
    for bad in (math.nan, math.inf, -math.inf):
        rows = rows_of(1)
        rows.begin_step(is_reported=True)
        for loss in (2.0, bad):
            rows.add_labels(torch.zeros(1, 4, dtype=torch.int64))
            rows.add_loss(torch.tensor(loss), torch.tensor(8))
        found.append(rows.curves())
    return found


def test_a_loss_that_is_not_finite_is_none_in_both_curves() -> None:
    [found] = run_ranks(curves_of_bad_losses, 1)
    for curves in found:
        assert math.isnan(curves["loss_metrics/global_avg_loss"])
        assert math.isnan(curves["loss_metrics/global_max_loss"])
