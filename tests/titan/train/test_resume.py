"""A run that is killed and started again is bit for bit the run that was not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import run_ranks
from tests.titan.runs import Run, a_run, config_file, layout, trainer_of, write_data

NUM_STEPS, KILLED_AFTER, INTERVAL = 12, 9, 4
RESUMED_FROM = 8  # the last multiple of INTERVAL before the kill

COMMON: dict[str, Any] = {
    **layout(dp=2, cp=2, ep=4),
    "training__steps": NUM_STEPS,
    "checkpoint__enable": True,
    "checkpoint__interval": INTERVAL,
    "checkpoint__last_save_model_only": False,
    "metrics__enable_tensorboard": True,
    "validator__enable": True,
    "validator__freq": 5,
    "validator__steps": 1,
    "model__moe__load_balance_coeff": 1e-2,  # biases are part of what is restored
}
WHOLE, KILLED = a_run("whole", **COMMON), a_run("killed", **COMMON)
OTHER_LAYOUT = a_run("killed", **COMMON | layout(dp=4, ep=2))


class Killed(Exception):
    """Stands in for the end of the process."""


def run_until(folder: Path, run: Run, kill_after: int | None) -> dict[str, Any]:
    """Train; on a kill nothing is saved or closed in order. Returns losses and biases."""
    trainer = trainer_of(folder, run)
    train_step = trainer.train_step

    def step_or_die(data: Any) -> None:
        if kill_after is not None and trainer.step > kill_after:
            raise Killed
        train_step(data)

    trainer.train_step = step_or_die
    try:
        trainer.train()
    except Killed:
        trainer.metrics_processor.close()  # a dead process's lock on the curves' folder is stale
        return {"losses": trainer.losses}
    state = trainer.checkpointer.states["model"].state_dict()
    biases = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
    biases = {k: v.tolist() for k, v in biases.items() if k.endswith("expert_bias_E")}
    result = {"losses": trainer.losses, "biases": biases}
    trainer.close()
    return result


def scenario(folder: str) -> dict[str, Any]:
    """All runs of this file inside one group of ranks."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    path = Path(folder)
    whole = run_until(path, WHOLE, None)
    killed = run_until(path, KILLED, KILLED_AFTER)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(path / "killed", path / "kept")
    dist.barrier()
    resumed = run_until(path, KILLED, None)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(path / "killed", path / "resumed")
        shutil.rmtree(path / "killed")
        shutil.copytree(path / "kept", path / "killed")
    dist.barrier()
    other = run_until(path, OTHER_LAYOUT, None)
    return {"whole": whole, "killed": killed, "resumed": resumed, "other layout": other}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("resume")
    write_data(folder)
    config_file(folder)
    return folder, run_ranks(scenario, 4, str(folder), timeout_s=500.0)[0]


def test_losses_of_the_resumed_run_are_the_uninterrupted_ones(
    outcome: tuple[Path, dict[str, Any]],
) -> None:
    _, runs = outcome
    assert runs["killed"]["losses"] == runs["whole"]["losses"][:KILLED_AFTER]
    assert runs["resumed"]["losses"] == runs["whole"]["losses"][RESUMED_FROM:]


def test_balancing_biases_are_the_uninterrupted_ones(outcome: tuple[Path, dict[str, Any]]) -> None:
    _, runs = outcome
    assert runs["whole"]["biases"]
    assert any(any(bias) for bias in runs["whole"]["biases"].values())
    assert runs["resumed"]["biases"] == runs["whole"]["biases"]


def test_curves_are_the_uninterrupted_ones_without_doubled_points(
    outcome: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = outcome
    for tag in ("loss_metrics/global_avg_loss", "validation_metrics/loss", "grad_norm"):
        whole, resumed = (points(folder / name / "tb", tag) for name in ("whole", "resumed"))
        assert whole == resumed
        assert len({step for step, _ in resumed}) == len(resumed) > 2


def test_a_run_goes_on_with_another_layout(outcome: tuple[Path, dict[str, Any]]) -> None:
    """Experts over 2 ranks instead of 4, no context parallelism; optimizer moments and all."""
    _, runs = outcome
    # Float32 sums in another order, as in test_parity.
    assert runs["other layout"]["losses"] == pytest.approx(
        runs["whole"]["losses"][RESUMED_FROM:], rel=1e-5
    )


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_scenario_is_what_it_says() -> None:
    assert RESUMED_FROM == KILLED_AFTER // INTERVAL * INTERVAL < KILLED_AFTER < NUM_STEPS
    assert json.dumps(COMMON)
