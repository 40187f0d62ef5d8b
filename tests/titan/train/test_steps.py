"""A step does what `[optimizer]`, `[lr_scheduler]` and `[training]` say, in numbers of one's own.

Layouts are compared with one rank elsewhere; here the one rank is, with formulas on Python floats
and float64.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import run_ranks
from tests.titan.runs import (
    GLOBAL_BATCH,
    SEED,
    SEQ_LEN,
    Run,
    a_run,
    config_file,
    layout,
    trainer_of,
    write_data,
)
from titan_relay.titan.train.trainer import token_keys

NUM_STEPS, LR, BETAS, EPS, DECAY, MAX_NORM = 4, 4e-3, (0.7, 0.85), 1e-4, 0.4, 0.05
# Two warm-up steps, then linearly from the step after them to nothing in step 41.
RATES = [LR / 2, LR, LR, LR * 37 / 38]
TWO_MICROBATCHES = layout() | {"training__local_batch_size": GLOBAL_BATCH // 2}
OPTIMIZED: dict[str, Any] = {
    **TWO_MICROBATCHES,
    "training__steps": NUM_STEPS,
    "training__max_norm": MAX_NORM,
    "optimizer__lr": LR,
    "optimizer__beta1": BETAS[0],
    "optimizer__beta2": BETAS[1],
    "optimizer__eps": EPS,
    "optimizer__weight_decay": DECAY,
}
OPTIMIZERS = [a_run(name, **OPTIMIZED, optimizer__name=name) for name in ("AdamW", "Adam")]
SAMPLED = a_run(
    "sampled",
    **TWO_MICROBATCHES,
    training__steps=2,
    model__family="phimoe",
    model__moe__score_func="sparsemixer",
    model__moe__route_norm=False,
    model__moe__router_jitter=0.1,
    model__moe__input_jitter=0.05,
    validator__enable=True,
    validator__freq=1,
    validator__steps=1,
)


def scenario(folder: str) -> dict[str, Any]:
    """All of this file on one rank."""
    torch.set_num_threads(1)
    found = {run.name: optimized(Path(folder), run) for run in OPTIMIZERS}
    return found | {"keys": keys_of_tokens(Path(folder), SAMPLED)}


def optimized(folder: Path, run: Run) -> dict[str, Any]:
    """Norms before and after clipping, and how far weights are from those of the formulas."""
    trainer = trainer_of(folder, run)
    named = dict(trainer.model_parts[0].named_parameters())
    start = {name: _copy(param) for name, param in named.items()}
    grads: list[dict[str, torch.Tensor]] = []
    trainer.optimizers.register_step_pre_hook(
        lambda *_: grads.append({name: _copy(param.grad) for name, param in named.items()})
    )
    trainer.train()
    clipped = [math.sqrt(sum(g.square().sum() for g in each.values())) for each in grads]
    off = {}
    for name, param in named.items():
        expected = _by_hand(start[name], [each[name] for each in grads], run.name)
        way = (expected - start[name]).abs().max()
        off[name] = float((_copy(param) - expected).abs().max() / way)
    norms = list(trainer.grad_norms)
    trainer.close()
    return {"norms": norms, "clipped": clipped, "off": off}


def _copy(tensor: Any) -> torch.Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().double().clone()


def _by_hand(weight: torch.Tensor, grads: list[torch.Tensor], name: str) -> torch.Tensor:
    """Adam (arXiv:1412.6980, algorithm 1) with L2 decay, or decoupled (arXiv:1711.05101)."""
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, (grad, rate) in enumerate(zip(grads, RATES, strict=True), start=1):
        if name == "Adam":
            grad = grad + DECAY * weight
        mean = BETAS[0] * mean + (1 - BETAS[0]) * grad
        square = BETAS[1] * square + (1 - BETAS[1]) * grad**2
        update = (mean / (1 - BETAS[0] ** step)) / ((square / (1 - BETAS[1] ** step)).sqrt() + EPS)
        if name == "AdamW":
            weight = weight - rate * DECAY * weight
        weight = weight - rate * update
    return weight


def keys_of_tokens(folder: Path, run: Run) -> list[tuple[int, bool, Any]]:
    """Of every forward: the step, whether it is one of training, and the keys of its tokens."""
    trainer, seen = trainer_of(folder, run), []
    (model,) = trainer.model_parts

    def look(module: Any, _: Any, given: dict[str, Any]) -> None:
        keys = given.get("token_keys")
        seen.append((trainer.step, module.training, None if keys is None else keys.tolist()))

    model.register_forward_pre_hook(look, with_kwargs=True)
    trainer.train()
    trainer.close()
    return seen


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("steps")
    write_data(folder)
    config_file(folder)
    (found,) = run_ranks(scenario, 1, str(folder), timeout_s=400.0)
    return found


@pytest.mark.parametrize("name", [run.name for run in OPTIMIZERS])
def test_gradients_are_clipped_by_the_norm_of_all_of_them(
    name: str, outcome: dict[str, Any]
) -> None:
    assert len(outcome[name]["norms"]) == NUM_STEPS
    assert min(outcome[name]["norms"]) > 2 * MAX_NORM
    assert outcome[name]["clipped"] == pytest.approx([MAX_NORM] * NUM_STEPS, rel=1e-4)


@pytest.mark.parametrize("name", [run.name for run in OPTIMIZERS])
def test_weights_are_those_of_the_optimizers_formulas(name: str, outcome: dict[str, Any]) -> None:
    # Of how far a weight went: roundings of float32 in the weights, a few steps of 1e-3 apart.
    assert {each: off for each, off in outcome[name]["off"].items() if not off < 1e-3} == {}


def test_noise_is_of_the_tokens_and_the_step_and_validation_has_none(
    outcome: dict[str, Any],
) -> None:
    places = torch.arange(GLOBAL_BATCH * SEQ_LEN).view(GLOBAL_BATCH, SEQ_LEN)
    for step in (1, 2):
        forwards = [keys for at, trains, keys in outcome["keys"] if (at, trains) == (step, True)]
        rows = [row for keys in forwards for row in keys]
        assert rows == token_keys(places, SEED, step).tolist()
    validated = [keys for _, trains, keys in outcome["keys"] if not trains]
    assert validated == [None] * 4  # two microbatches after each of two steps
