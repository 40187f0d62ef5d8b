"""Steps whose loss, gradient or router logits are not finite change nothing, on any rank."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.cli import run_cli
from tests.support.distributed import run_ranks
from tests.titan.runs import a_run, config_file, layout, trainer_of, write_data
from titan_relay.titan.model.experts import local_part
from titan_relay.titan.model.finite import NonFiniteStepError
from titan_relay.titan.train.trainer import StepObserver

BAD_STEP, NUM_STEPS, BAD_LAYER = 3, 4, 1
TWO_RANKS = layout(dp=2, ep=2)
LAYOUTS: dict[str, dict[str, Any]] = {  # of four ranks
    "relay": layout(dp=2, cp=2, ep=4) | {"metrics__log_freq": 100},
    "all-to-all": layout(rep=2, dp=2, ep=2) | {"relay__dispatcher": "alltoall"},
    "accumulation": layout(dp=2, tp=2, ep=4) | {"training__local_batch_size": 2},
    "pipeline": layout(dp=2, pp=2, ep=2) | {"metrics__log_freq": 100},
}
COMMON: dict[str, Any] = {
    "training__steps": NUM_STEPS,
    "checkpoint__enable": True,
    "checkpoint__interval": 1,
    "checkpoint__keep_latest_k": 0,
    "checkpoint__last_save_model_only": False,
    "model__moe__load_balance_coeff": 1e-2,
}
Spoil = Callable[[Any], None]


def is_last_rank() -> bool:
    """Where something goes wrong."""
    return dist.get_rank() == dist.get_world_size() - 1


def bad_gradient(*steps: int, value: float = math.nan) -> Spoil:
    """One element of a gradient of BAD_LAYER that the last rank holds."""

    def spoil(trainer: Any) -> None:
        def after(parameter: torch.Tensor) -> None:
            if trainer.step in steps and is_last_rank():
                assert parameter.grad is not None
                local_part(parameter.grad).view(-1)[0] = value

        for name, parameter in trainer.model_parts[-1].named_parameters():
            if f"layers.{BAD_LAYER}." in name and name.endswith("wo.weight"):
                parameter.register_post_accumulate_grad_hook(after)

    return spoil


def bad_loss(trainer: Any) -> None:
    """One infinite logit of one token on the last rank."""

    def poison(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        if trainer.step == BAD_STEP and is_last_rank() and module.training:
            logits = logits.clone()
            logits[0, 0, 0] = math.inf
        return logits

    trainer.model_parts[-1].lm_head.register_forward_hook(poison)


def bad_weight(trainer: Any) -> None:
    """A weight of the last rank that BAD_STEP's update itself made infinite."""

    def after(*_: Any) -> None:
        if trainer.step == BAD_STEP and is_last_rank():
            local_part(trainer.model_parts[0].lm_head.weight).data.view(-1)[0] = math.inf

    trainer.optimizers.register_step_post_hook(after)


def tensors_of(trainer: Any) -> Iterator[torch.Tensor]:
    """This rank's weights, balancing biases and optimizer state."""
    for part in trainer.model_parts:
        yield from map(local_part, part.state_dict().values())
    for optimizer in trainer.optimizers.optimizers:
        for state in optimizer.state.values():
            yield from (local_part(value) for value in state.values())


class Undo(StepObserver):
    """Puts everything back after a step, as if the optimizer had not stepped."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def before_step(self, *, has_optimizer_state: bool) -> None:
        self._before = [each.clone() for each in tensors_of(self._trainer)]

    def after_step(self, step: int) -> None:
        if step == BAD_STEP:
            with torch.no_grad():
                for tensor, before in zip(tensors_of(self._trainer), self._before, strict=True):
                    tensor.copy_(before)


def train(
    folder: Path, name: str, spoil: Spoil | None, *, undo: bool = False, **settings: Any
) -> dict[str, Any]:
    """Train to the end or to the error; what this rank has then, and the steps on disk."""
    trainer = trainer_of(folder, a_run(name, **COMMON | settings))
    if spoil is not None:
        spoil(trainer)
    message, ends = "", {}

    class Keep(StepObserver):
        def before_step(self, *, has_optimizer_state: bool) -> None:
            ends["before"] = [each.clone() for each in tensors_of(trainer)]

    try:
        with trainer.observed(Undo(trainer)) if undo else trainer.observed(Keep()):
            trainer.train()
    except NonFiniteStepError as error:
        message = str(error)
    after = [each.clone() for each in tensors_of(trainer)]
    before = ends.get("before", [])
    trainer.close()
    dist.barrier()
    steps = sorted(int(p.name[5:]) for p in (folder / name / "checkpoint").glob("step-*"))
    return {
        "message": message,
        "steps": steps,
        "unchanged": len(before) == len(after) and all(map(torch.equal, before, after)),
        "tensors": [each.numpy() for each in after],
        "losses": trainer.losses,
        "validation": trainer.validation_losses,
        "skipped": trainer.finite.skipped.count,
    }


ONE_SKIP = {"training__max_skipped_steps": 1}
VALIDATED = {"validator__enable": True, "validator__freq": 2, "validator__steps": 1}


def skipping(folder: Path, name: str, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A run that skips a step, and a sound one of which that step is undone."""
    settings = settings | ONE_SKIP | VALIDATED
    return {
        f"{name} skips": train(folder, f"{name} s", bad_gradient(BAD_STEP), **settings),
        f"{name} undone": train(folder, f"{name} u", None, undo=True, **settings),
    }


def two_ranks(folder: str) -> dict[str, dict[str, Any]]:
    """The runs whose layout does not matter."""
    torch.set_num_threads(1)
    path = Path(folder)
    rarely = TWO_RANKS | {"metrics__log_freq": 100}
    found = skipping(path, "two ranks", TWO_RANKS)
    found["gradient"] = train(path, "g", bad_gradient(BAD_STEP), **rarely)
    found["loss"] = train(path, "l", bad_loss, **rarely)
    found["loss skipped"] = train(path, "ls", bad_loss, **TWO_RANKS | ONE_SKIP | VALIDATED)
    found["weight"] = train(path, "w", bad_weight, **TWO_RANKS)
    for name in ("twice", "twice again"):
        spoil = bad_gradient(BAD_STEP, NUM_STEPS)
        found[name] = train(path, "t", spoil, **TWO_RANKS | ONE_SKIP)
    return found


def four_ranks(folder: str) -> dict[str, dict[str, Any]]:
    """Every way of cutting the model and the batch, and other bad values."""
    torch.set_num_threads(1)
    path = Path(folder)
    found = {}
    for name, settings in LAYOUTS.items():
        found[name] = train(path, name, bad_gradient(BAD_STEP), **settings)
        found |= skipping(path, name, settings)
    relay = LAYOUTS["relay"]
    found["infinite"] = train(path, "i", bad_gradient(BAD_STEP, value=-math.inf), **relay)
    found["overflow"] = train(path, "o", bad_gradient(BAD_STEP, value=1e30), **relay)
    found["first"] = train(path, "f", bad_gradient(1), **relay)
    found["last"] = train(path, "e", bad_gradient(NUM_STEPS), **relay)
    return found


def _outcome(scenario: Callable[[str], Any], num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    write_data(folder)
    config_file(folder)
    return run_ranks(scenario, num_ranks, str(folder), timeout_s=500.0)


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _outcome(two_ranks, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def by_rank_of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _outcome(four_ranks, 4, tmp_path_factory.mktemp("four"))


def stopped_unchanged(ranks: list[dict[str, Any]], name: str, step: int, what: str) -> None:
    """All ranks stopped in `step` because of `what`, and nothing of it is kept."""
    for rank in ranks:
        message = f"step {step}: NaN or infinity in {what.format(last=len(ranks) - 1)}"
        assert rank[name]["message"].startswith(message)
        assert rank[name]["unchanged"]
        assert rank[name]["steps"] == list(range(1, step))


def skipped_as_undone(ranks: list[dict[str, Any]], name: str) -> None:
    """A run that skipped has, bit for bit, what one has whose update was taken back."""
    for rank in ranks:
        skips, undone = rank[f"{name} skips"], rank[f"{name} undone"]
        assert (skips["message"], skips["skipped"], undone["skipped"]) == ("", 1, 0)
        pairs = zip(skips["tensors"], undone["tensors"], strict=True)
        assert all((a == b).all() for a, b in pairs)
        assert skips["losses"] == undone["losses"]
        assert skips["validation"] == undone["validation"]
        assert skips["steps"] == list(range(1, NUM_STEPS + 1))


GRADIENT = f"the gradient of layer {BAD_LAYER} on rank {{last}}; "


def test_a_bad_gradient_stops_all_ranks_before_anything_changed(
    by_rank: list[dict[str, Any]],
) -> None:
    stopped_unchanged(by_rank, "gradient", BAD_STEP, GRADIENT)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, "infinite", "overflow"])
def test_a_bad_gradient_stops_all_ranks_in_every_layout(
    name: str, by_rank_of_four: list[dict[str, Any]]
) -> None:
    stopped_unchanged(by_rank_of_four, name, BAD_STEP, GRADIENT)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), [("first", 1), ("last", NUM_STEPS)])
def test_the_first_and_the_last_step_are_no_exception(
    name: str, step: int, by_rank_of_four: list[dict[str, Any]]
) -> None:
    stopped_unchanged(by_rank_of_four, name, step, GRADIENT)


def test_an_infinite_loss_is_named_with_its_rank(by_rank: list[dict[str, Any]]) -> None:
    what = "the loss on rank {last} and in the gradient of layers"
    stopped_unchanged(by_rank, "loss", BAD_STEP, what)


def test_a_skipped_step_leaves_what_a_run_without_that_update_has(
    by_rank: list[dict[str, Any]],
) -> None:
    skipped_as_undone(by_rank, "two ranks")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_is_skipped_in_every_layout(
    name: str, by_rank_of_four: list[dict[str, Any]]
) -> None:
    skipped_as_undone(by_rank_of_four, name)


def test_a_step_with_an_infinite_loss_is_skipped_where_it_is_reported(
    by_rank: list[dict[str, Any]],
) -> None:
    for rank in by_rank:
        assert rank["loss skipped"]["message"] == ""
        assert rank["loss skipped"]["skipped"] == 1
        assert all(map(math.isfinite, rank["loss skipped"]["validation"]))


@pytest.mark.parametrize("name", ["twice", "twice again"])
def test_the_step_beyond_those_that_may_be_skipped_ends_the_run_and_each_resume_of_it(
    name: str, by_rank: list[dict[str, Any]]
) -> None:
    stopped_unchanged(by_rank, name, NUM_STEPS, GRADIENT)
    for rank in by_rank:
        assert rank[name]["message"].endswith("max_skipped_steps = 1 (1 skipped before)")


def test_weights_that_an_update_made_infinite_are_not_saved(
    by_rank: list[dict[str, Any]],
) -> None:
    for rank in by_rank:
        assert rank["weight"]["steps"] == list(range(1, BAD_STEP))
        message = rank["weight"]["message"]
        assert f"checkpoint/step-{BAD_STEP} is not written: lm_head.weight holds NaN" in message
        assert "on rank 1" in message


def test_a_run_that_diverges_says_so_in_one_line(tmp_path: Path) -> None:
    write_data(tmp_path)
    arguments = ["--config", str(config_file(tmp_path)), "--dump_folder", str(tmp_path / "run")]
    arguments += ["--optimizer.lr", "1e37", "--metrics.log_freq", "100"]
    done = run_cli(*arguments)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: step 2: NaN or infinity in ")
    assert "Traceback" not in done.stderr
