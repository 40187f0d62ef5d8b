"""What "auto" may spend is what memory leaves: of this rank's share, less the margin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.titan.recompute.blocks import relay_model
from tests.titan.runs import a_run, config_file, layout, load_run
from tests.titan.tiny import TINY, apply_model, row_positions
from titan_relay.private_torch import end_process_groups
from titan_relay.titan.recompute.choice import RetentionChoice


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    end_process_groups()


@pytest.mark.parametrize(
    ("settings", "local_ranks", "level"),
    [
        ({}, 1, "full"),
        ({}, 1_000_000, "recompute"),
        ({"safety_margin": 0.99999}, 1, "recompute"),
        ({"safety_margin": 0.99999, "budget_gib": 1.0}, 1, "full"),
    ],
)
def test_levels_are_those_that_the_memory_left_has_room_for(
    settings: dict[str, Any], local_ranks: int, level: str, tmp_path: Path
) -> None:
    keys = {f"attention_retention__{key}": value for key, value in settings.items()}
    run = a_run("choice", **layout(), attention_retention__mode="auto", **keys)
    model: Any = relay_model(TINY, ("recompute",) * 2)
    choice = RetentionChoice(
        load_run(config_file(tmp_path).parent, run),
        1,
        model.levels,
        itemsize=4,
        device=torch.device("cpu"),
        local_ranks=local_ranks,
    )
    assert set(model.levels.of_layer.values()) == {
        level if "budget_gib" in settings else "recompute"
    }
    tokens = torch.zeros(2, 16, dtype=torch.long)
    for _ in range(2):
        apply_model(model, tokens, row_positions(2, 16)).square().sum().backward()
        choice.after_step()
    assert [*model.levels.of_layer.values()] == [level] * 2
