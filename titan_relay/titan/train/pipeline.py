"""Pipeline parallelism on torch 2.13, whose schedules cut a batch into microbatches themselves.

torchtitan 0.3 hands a schedule its microbatches, each with its own positions and masks; schedules
accept that from torch 2.14 on.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn
from torchtitan.distributed.pipeline_parallel import pipeline_llm

from titan_relay.private_torch import after_metadata_inference, run_microbatches, stages_of
from titan_relay.titan.model.balance_hook import moe_layers

PipelineParts = tuple[Any, list[nn.Module], bool, bool]


def pipeline(model: nn.Module, **kwargs: Any) -> PipelineParts:
    """torchtitan's `pipelining_fn`: the schedule, this rank's parts, is first stage, is last."""
    schedule, parts, has_first, has_last = pipeline_llm(model, **kwargs)
    for stage in stages_of(schedule):
        after_metadata_inference(stage, functools.partial(_forget_load, stage))
    if "arg_mbs" not in inspect.signature(type(schedule).step).parameters:
        schedule = MicrobatchSchedule(schedule)
    return schedule, parts, has_first, has_last


def _forget_load(stage: Any) -> None:
    """Drop what routers recorded while a stage found out its shapes.

    Its gradients of that are cleared, but our meters would keep its loads, or stop the run if the
    memory held a NaN.
    """
    for _, moe in moe_layers([stage.submod]):
        moe.meter.reset()


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
        run_microbatches(
            self._schedule,
            (arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs),
            has_backward=has_backward,
            loss_kwargs=loss_kwargs,
        )
