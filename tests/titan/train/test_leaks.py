"""What a run opens it closes: threads and descriptors of one process, over validations and runs."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from tests.titan.runs import Run, a_run, config_file, layout, load_run, trainer_of, write_data
from titan_relay.titan.device import this_device
from titan_relay.titan.plan.background import BackgroundPlan, Request

pytestmark = pytest.mark.timeout(600)

NUM_VALIDATIONS, NUM_RUNS = 6, 3
COMMON: dict[str, Any] = {
    **layout(),
    "validator__enable": True,
    "validator__freq": 1,
    "metrics__log_freq": 100,
}
VALIDATED = {
    "some of the rows": {"validator__steps": 1},
    "all of the rows": {},
    "a Parquet file": {
        "validator__steps": 1,
        "validator__data__files": '["{folder}/some.parquet"]',
    },
}
SAVED = {
    "training__steps": 3,
    "validator__steps": 1,
    "validator__freq": 3,
    "metrics__enable_tensorboard": True,
    "checkpoint__enable": True,
    "checkpoint__interval": 1,
    "checkpoint__keep_latest_k": 2,
}
RUNS = {
    "checkpoints and curves": SAVED,
    "checkpoints by a thread": {**SAVED, "checkpoint__async_mode": "async"},
}


class Opened:
    """Threads by name and descriptors by kind that this process has more than it had."""

    def __init__(self) -> None:
        self._before = self._now()

    def more(self) -> list[str]:
        """What there is more, once threads that were told to end have had a moment for it."""
        for _ in range(30):
            gc.collect()
            more = sorted((self._now() - self._before).elements())
            if not more:
                break
            time.sleep(0.1)
        return more

    @staticmethod
    def _now() -> Counter[str]:
        opened = Counter(
            f"thread {(task / 'comm').read_text().strip()}"
            for task in Path("/proc/self/task").iterdir()
        )
        for descriptor in Path("/proc/self/fd").iterdir():
            try:
                opened[os.readlink(descriptor).split(":[")[0]] += 1
            except FileNotFoundError:  # the one that lists them
                continue
        return opened


def scenario(folder: str) -> dict[str, list[str]]:
    torch.set_num_threads(1)
    more: dict[str, list[str]] = {}
    for name, settings in VALIDATED.items():
        settings = {
            key: value.format(folder=folder) if isinstance(value, str) else value
            for key, value in settings.items()
        }
        run = a_run(name, **COMMON | settings, training__steps=NUM_VALIDATIONS)
        more[name] = _over_validations(Path(folder), run)
    dist.destroy_process_group()
    for name, settings in RUNS.items():
        more[name] = _over_runs(Path(folder), name, settings)
    more["plans"] = _over_plans(Path(folder))
    _begin_group()  # which `run_ranks` ends
    return more


def _over_validations(folder: Path, run: Run) -> list[str]:
    """Of all validations but the first two, after which nothing is met for the first time."""
    trainer = trainer_of(folder, run)
    validate, opened = trainer.validator.validate, []

    def counted(model_parts: Any, step: int) -> None:
        validate(model_parts, step)
        if step == 2:
            opened.append(Opened())

    trainer.validator.validate = counted
    trainer.train()
    more: list[str] = opened[0].more()
    trainer.close()
    return more


def _over_runs(folder: Path, name: str, settings: dict[str, Any]) -> list[str]:
    opened = None
    for number in range(NUM_RUNS):
        _begin_group()
        trainer = trainer_of(folder, a_run(f"{name} {number}", **COMMON | settings))
        trainer.train()
        trainer.close()
        del trainer
        dist.destroy_process_group()
        if number == 0:
            gc.collect()
            opened = Opened()
    assert opened is not None
    return opened.more()


def _over_plans(folder: Path) -> list[str]:
    request = Request(load_run(folder, a_run("plan", **COMMON)), 1, 0, this_device())
    opened = Opened()
    for _ in range(3):
        BackgroundPlan(request).close()
    return opened.more()


def _begin_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("leaks")
    write_data(folder)
    config_file(folder)
    pq.write_table(
        pa.table({"text": [f"{n} of some" * 9 for n in range(40)]}), folder / "some.parquet"
    )
    (result,) = run_ranks(scenario, 1, str(folder), timeout_s=500.0)
    return result


@pytest.mark.parametrize("name", list(VALIDATED))
def test_a_validation_closes_what_it_opened(name: str, more: dict[str, list[str]]) -> None:
    assert more[name] == []


@pytest.mark.parametrize("name", [*RUNS, "plans"])
def test_a_run_closes_what_it_opened(name: str, more: dict[str, list[str]]) -> None:
    assert more[name] == []
