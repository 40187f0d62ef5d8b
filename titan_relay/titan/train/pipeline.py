"""Pipeline parallelism on torch 2.13, whose schedules cut a batch into microbatches themselves.

torchtitan 0.3 hands a schedule its microbatches, each with its own positions and masks; schedules
accept that from torch 2.14 on.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from torchtitan.distributed.pipeline_parallel import pipeline_llm

from titan_relay.titan.model.balance_hook import moe_layers

PipelineParts = tuple[Any, list[nn.Module], bool, bool]


def pipeline(model: nn.Module, **kwargs: Any) -> PipelineParts:
    """torchtitan's `pipelining_fn`: the schedule, this rank's parts, is first stage, is last."""
    schedule, parts, has_first, has_last = pipeline_llm(model, **kwargs)
    for stage in _stages(schedule):
        _forget_metadata_inference(stage)
    if "arg_mbs" not in inspect.signature(type(schedule).step).parameters:
        schedule = MicrobatchSchedule(schedule)
    return schedule, parts, has_first, has_last


def _stages(schedule: Any) -> Sequence[Any]:
    one = getattr(schedule, "_stage", None)
    return schedule._stages if one is None else [one]


def _forget_metadata_inference(stage: Any) -> None:
    """Drop what routers recorded while a stage found out its shapes.

    Before its first step a stage runs forward and backward on uninitialised memory. Its gradients
    are cleared, but our meters would keep its loads, or stop the run if that memory held a NaN.
    """
    clean_up = stage._post_metadata_inference_cleanup

    def clean_up_and_reset() -> None:
        clean_up()
        for _, moe in moe_layers([stage.submod]):
            moe.meter.reset()

    stage._post_metadata_inference_cleanup = clean_up_and_reset


class MicrobatchSchedule:
    """Runs a torch 2.13 schedule on microbatches that are already cut."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def step(self, **microbatches: Any) -> None:
        """Forward and backward of all microbatches; losses are appended to `losses`."""
        self._run(has_backward=True, **microbatches)

    def eval(self, **microbatches: Any) -> None:
        """Forward of all microbatches; losses are appended to `losses`."""
        self._run(has_backward=False, **microbatches)

    def _run(
        self,
        *,
        has_backward: bool,
        arg_mbs: list[Any] | None,
        kwarg_mbs: list[Any],
        target_mbs: list[Any] | None,
        losses: list[Any] | None,
        loss_kwargs: dict[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> None:
        self._schedule._has_backward = has_backward
        for stage in _stages(self._schedule):
            stage.has_backward = has_backward
            stage.clear_runtime_states()
        self._schedule._step_microbatches(
            arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
        )
