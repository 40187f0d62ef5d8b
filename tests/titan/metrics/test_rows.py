"""Tokens of the whole run in checkpoints, older ones too; losses are in test_curves."""

from types import SimpleNamespace

import pytest
import torch

from titan_relay.titan.metrics.rows import RowCurves

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
