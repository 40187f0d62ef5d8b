"""Runs whose curves are compared with values that were computed another way.

`trained` trains a run and returns what its ranks can say for themselves: clocks, memory, bytes.
`watched` trains it on one rank and computes, beside every step, what the step's curves should be:
from plain forwards of the same weights, one row at a time, with nothing of the trainer's own sums.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.titan.runs import GLOBAL_BATCH, SEED, SEQ_LEN, Run, a_run, layout, trainer_of
from tests.titan.tiny import apply_model
from titan_relay.data import IGNORE_INDEX, LaneReader, load_tokenizer
from titan_relay.titan.model.balance_hook import moe_layers

NUM_STEPS, TOKENS_PER_STEP = 3, GLOBAL_BATCH * SEQ_LEN
VALIDATED = {1, 2, NUM_STEPS}  # the first, every second, the last
NUM_FEW = 9  # documents of finite data: steps enough, the last with tokens for one rank only
COMMON: dict[str, Any] = {
    "training__steps": NUM_STEPS,
    "metrics__enable_tensorboard": True,
    "validator__enable": True,
    "validator__freq": 2,
    "validator__steps": 1,
}
FINITE = {"data__infinite": False, "validator__enable": False}
EXPERTS, TOKENS = {"relay__circulate": "experts"}, {"relay__circulate": "tokens"}


@dataclass(frozen=True)
class Layout:
    """A run on four ranks, or on one, and what its curves depend on."""

    settings: dict[str, Any]
    num_groups: int  # of ranks that share no rows
    num_ranks: int = 4
    ep: int = 1
    local_layers: int = 2
    microbatch_tokens: int = 0  # of a rank's MoE layers
    num_microbatches: int = 1

    @property
    def is_finite(self) -> bool:
        return "data__infinite" in self.settings

    @property
    def circulate(self) -> str | None:
        return self.settings.get("relay__circulate") if self.ep > 1 else None

    @property
    def level(self) -> str:
        return str(self.settings.get("attention_retention__mode", "recompute"))


LAYOUTS = {
    "one rank, accumulation": Layout(
        {**layout(), "training__local_batch_size": 2}, num_groups=1, num_ranks=1
    ),
    "dp 2, cp 2, ep 4": Layout(
        {**layout(dp=2, cp=2, ep=4), **EXPERTS}, num_groups=2, ep=4, microbatch_tokens=128
    ),
    "cp 4, ep 2": Layout(
        {**layout(cp=4, ep=2), **TOKENS, "attention_retention__mode": "full"},
        num_groups=1,
        ep=2,
        microbatch_tokens=128,
    ),
    "dp 4, ep 4, accumulation": Layout(
        {
            **layout(dp=4, ep=4),
            "training__local_batch_size": 1,
            **TOKENS,
            "attention_retention__mode": "output",
        },
        num_groups=4,
        ep=4,
        microbatch_tokens=64,
        num_microbatches=2,
    ),
    "dp 2, tp 2": Layout(layout(dp=2, tp=2), num_groups=2),
    "dp 2, tp 2, ep 4": Layout(
        {**layout(dp=2, tp=2, ep=4), **EXPERTS}, num_groups=2, ep=4, microbatch_tokens=128
    ),
    "dp 2, pp 2": Layout(layout(dp=2, pp=2), num_groups=2, local_layers=1),
    "finite, dp 4": Layout({**layout(dp=4), **FINITE}, num_groups=4),
    "finite, dp 2, cp 2, accumulation": Layout(
        {**layout(dp=2, cp=2), **FINITE, "training__local_batch_size": 1}, num_groups=2
    ),
}
SAVED: dict[str, Any] = {
    **COMMON,
    "validator__enable": False,
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
    "checkpoint__last_save_model_only": False,
}
# Four ranks, two pairs of ranks that repeat tokens, one rank: no rank's own count fits all.
RESUMED = [
    a_run("resumed", **SAVED | {"training__steps": steps} | degrees)
    for steps, degrees in ((2, layout(dp=4)), (4, layout(dp=2, tp=2)), (6, layout()))
]


@dataclass
class Beside:
    """What one rank measured beside its steps; all by step."""

    step_seconds: dict[int, float] = field(
        default_factory=dict
    )  # within one step, up to its report
    report_seconds: dict[int, float] = field(default_factory=dict)  # since the report before
    # From a validation's beginning to its loss, and to its report.
    validation_seconds: dict[int, tuple[float, float]] = field(default_factory=dict)
    state_bytes: int = 0  # parameters, gradients and two moments
    peak_resident_bytes: int = 0
    num_flops_per_token: int = 0


@dataclass
class Truth:
    """What the curves of each step should be, from one rank's plain forwards."""

    row_losses: list[list[float]] = field(default_factory=list)  # sums over a row's tokens
    row_tokens: list[list[int]] = field(default_factory=list)
    tokens_LE: list[list[list[int]]] = field(default_factory=list)
    aux_losses: list[float] = field(default_factory=list)
    z_losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    validation_losses: dict[int, float] = field(default_factory=dict)


def trained(folder: str, runs: list[Run]) -> dict[str, Beside]:
    """Train each run in this rank's process group."""
    return {run.name: _trained(Path(folder), run) for run in runs}


def _trained(folder: Path, run: Run) -> Beside:
    torch.set_num_threads(1)
    trainer, beside = trainer_of(folder, run), Beside()
    metrics = trainer.metrics_processor
    log, log_validation, train_step = metrics.log, metrics.log_validation, trainer.train_step
    report = step_start = validation_start = time.perf_counter()

    def timed_log(step: int, *args: Any, **more: Any) -> None:
        nonlocal report
        start = time.perf_counter()
        beside.step_seconds[step] = start - step_start
        log(step, *args, **more)
        # An interval begins within the report before.
        beside.report_seconds[step], report = time.perf_counter() - report, start

    def timed_step(data: Any) -> None:
        nonlocal step_start
        step_start = time.perf_counter()
        train_step(data)

    def timed_log_validation(loss: float, step: int, **more: Any) -> None:
        computed = time.perf_counter() - validation_start
        log_validation(loss, step, **more)
        reported = time.perf_counter() - validation_start
        beside.validation_seconds[step] = (computed, reported)

    def timed_validation(model_parts: Any, step: int) -> None:
        nonlocal validation_start
        validation_start = time.perf_counter()
        validate(model_parts, step)

    if trainer.config.validator.enable:
        validate, trainer.validator.validate = trainer.validator.validate, timed_validation
    metrics.log, metrics.log_validation = timed_log, timed_log_validation
    trainer.train_step = timed_step
    trainer.train()
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    beside.state_bytes = 4 * sum(_local(p).numel() * 4 for p in parameters)
    beside.num_flops_per_token = trainer.metrics_processor.num_flops_per_token
    trainer.close()
    status = Path("/proc/self/status").read_text()
    beside.peak_resident_bytes = int(status.split("VmHWM:")[1].split()[0]) * 1024
    del trainer, parameters
    gc.collect()
    return beside


def watched(folder: str, runs: list[Run]) -> dict[str, Truth]:
    """Train each run on this one rank, without accumulation, and watch it."""
    return {run.name: _watched(Path(folder), run) for run in runs}


def _watched(folder: Path, run: Run) -> Truth:
    torch.set_num_threads(1)
    trainer, truth = trainer_of(folder, run), Truth()
    (model,) = trainer.model_parts
    forward_backward = trainer.forward_backward_step

    def watched_step(*, input_dict: Any, labels: torch.Tensor, **more: Any) -> Any:
        _record_forward(truth, model, input_dict, labels)
        loss = forward_backward(input_dict=input_dict, labels=labels, **more)
        squares = [_local(p.grad).double().square().sum() for p in model.parameters()]
        truth.grad_norms.append(math.sqrt(sum(squares)))
        return loss

    trainer.forward_backward_step = watched_step
    if trainer.config.validator.enable:
        validate = trainer.validator.validate

        def watched_validation(model_parts: Any, step: int) -> None:
            truth.validation_losses[step] = _validation_loss(trainer, model)
            validate(model_parts, step)

        trainer.validator.validate = watched_validation
    trainer.train()
    trainer.close()
    return truth


def _record_forward(truth: Truth, model: Any, batch: Any, labels_BL: torch.Tensor) -> None:
    routings: list[Any] = []
    hooks = [
        moe.router.register_forward_hook(lambda _, __, routing: routings.append(routing))
        for _, moe in moe_layers([model])
    ]
    losses, tokens = _row_losses(model, batch["input"], labels_BL, batch["positions"])
    for hook in hooks:
        hook.remove()
    truth.row_losses.append(losses)
    truth.row_tokens.append(tokens)
    valid_BL, num_tokens = labels_BL != IGNORE_INDEX, sum(tokens)
    loads, aux, z = [], [], []
    for routing in routings:
        num_experts = routing.logits_BLE.shape[-1]
        loads.append(
            torch.bincount(routing.expert_ids_BLK[valid_BL].flatten(), minlength=num_experts)
        )
        z.append(routing.logits_BLE[valid_BL].double().logsumexp(-1).square().sum() / num_tokens)
        aux.append(
            sum(map(_aux_sum, routing.expert_ids_BLK, routing.logits_BLE, valid_BL)) / num_tokens
        )
    truth.tokens_LE.append([load.tolist() for load in loads])
    truth.aux_losses.append(float(sum(aux)) / len(aux))
    truth.z_losses.append(float(sum(z)) / len(z))


def _aux_sum(ids_LK: torch.Tensor, logits_LE: torch.Tensor, valid_L: torch.Tensor) -> torch.Tensor:
    """E * sum over a row's tokens of sum_e (the row's share of e) * (softmax probability of e)."""
    num_experts = logits_LE.shape[-1]
    if not valid_L.any():
        return torch.zeros((), dtype=torch.float64)
    count_E = torch.bincount(ids_LK[valid_L].flatten(), minlength=num_experts).double()
    probs_LE = logits_LE[valid_L].double().softmax(-1)
    return num_experts * (probs_LE * count_E / count_E.sum()).sum()


@torch.no_grad()
def _row_losses(
    model: Any, inputs_BL: torch.Tensor, labels_BL: torch.Tensor, positions_BL: torch.Tensor
) -> tuple[list[float], list[int]]:
    logits_BLV = apply_model(model, inputs_BL, positions_BL).double()
    loss_BL = F.cross_entropy(
        logits_BLV.transpose(1, 2), labels_BL, ignore_index=IGNORE_INDEX, reduction="none"
    )
    return loss_BL.sum(1).tolist(), (labels_BL != IGNORE_INDEX).sum(1).tolist()


def _validation_loss(trainer: Any, model: Any) -> float:
    """Over `validator.steps` global batches from the beginning of the validation data."""
    run = trainer.config.run
    reader = LaneReader(
        run.validator.data,
        load_tokenizer(run.tokenizer),
        seq_len=SEQ_LEN,
        num_lanes=GLOBAL_BATCH,
        lanes=range(GLOBAL_BATCH),
        seed=SEED,
    )
    total, num_tokens = 0.0, 0
    for _ in range(run.validator.steps):
        rows = {key: torch.from_numpy(np.asarray(each)) for key, each in reader.next_rows().items()}
        positions = rows["positions"].masked_fill(rows["labels"] == IGNORE_INDEX, -1)
        losses, tokens = _row_losses(model, rows["input"], rows["labels"], positions)
        total, num_tokens = total + sum(losses), num_tokens + sum(tokens)
    reader.close()
    return total / num_tokens


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
