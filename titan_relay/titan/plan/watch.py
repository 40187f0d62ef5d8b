"""A run's plan: printed instead of the run, or logged beside it and held against measurements."""

from __future__ import annotations

import sys

import torch.distributed as dist
from torchtitan.tools.logging import logger

from titan_relay.config import RunConfig
from titan_relay.titan.device import this_device
from titan_relay.titan.metrics.processor import RelayMetricsProcessor
from titan_relay.titan.plan.background import BackgroundPlan, PlanError, Planned, Request
from titan_relay.titan.train.trainer import StepObserver
from titan_relay.units import in_mib

_TOLERANCE = 0.05


class PlanWatch(StepObserver):
    """Follows a plan from its start to its report, over the first steps of a run.

    Args:
        plan: of this rank, under way; closed with the watch.
        metrics: of a rank that reports; knows what a step took, and has the curves' folder.
        alltoall: the run goes through the all-to-all, whose memory depends on the router.
    """

    def __init__(
        self, plan: BackgroundPlan, metrics: RelayMetricsProcessor, *, alltoall: bool
    ) -> None:
        self._plan: BackgroundPlan | None = plan
        self._metrics, self._alltoall = metrics, alltoall
        self._measured_bytes: int | None = None
        self._had_state: bool | None = None

    def before_step(self, *, has_optimizer_state: bool) -> None:
        """Note whether the first step of this process begins with state from a checkpoint."""
        if self._had_state is None:
            self._had_state = has_optimizer_state

    def after_step(self, step: int) -> None:
        """Take the first step's measurement; report once the plan is there."""
        if self._measured_bytes is None:
            self._measured_bytes = self._metrics.live_peak_bytes
        if self._plan is None:
            return
        try:
            planned = self._plan.poll()
        except PlanError as error:
            logger.warning(f"There is no plan of this run: {error}")
            self._stop()
            return
        if planned is not None:
            self._report(planned, step)
            self._stop()

    def close(self) -> None:
        """Stop planning if the run ends first."""
        if self._plan is not None:
            logger.info("The run ended before its plan was ready; --plan makes one by itself.")
        self._stop()

    def _stop(self) -> None:
        if self._plan is not None:
            self._plan.close()
            self._plan = None

    def _report(self, planned: Planned, step: int) -> None:
        lines = [*planned.lines, *self._comparison(planned)]
        logger.info("Plan of this rank:\n" + "\n".join(lines))
        self._metrics.note("plan", "    " + "\n    ".join(lines), step)

    def _comparison(self, planned: Planned) -> list[str]:
        if not self._measured_bytes:
            return []
        predicted = planned.steady_bytes if self._had_state else planned.first_bytes
        ratio = self._measured_bytes / predicted
        line = (
            f"First step: predicted {in_mib(predicted, 1)}, measured "
            f"{in_mib(self._measured_bytes, 1)}, {ratio - 1:+.1%}"
        )
        if abs(ratio - 1) > _TOLERANCE:
            why = " The router was not balanced, or" if self._alltoall else ""
            logger.warning(f"{line}.{why} the plan does not see all of this run.")
        return [line]


EXIT_DOES_NOT_FIT = 1


def watch_plan(run: RunConfig, metrics: RelayMetricsProcessor) -> PlanWatch:
    """Begin to plan this rank of a run whose process group is there."""
    request = Request(run, dist.get_world_size(), dist.get_rank(), this_device(), worst=False)
    return PlanWatch(BackgroundPlan(request), metrics, alltoall=run.relay.dispatcher == "alltoall")


def print_plan(run: RunConfig, world_size: int) -> int:
    """Print the plan of rank 0; returns the exit code, 1 if the run does not fit."""
    request = Request(run, world_size, 0, this_device(), changes=True)
    plan = BackgroundPlan(request, low_priority=False)
    print(f"One step of {run.model.num_layers} layers on fake tensors ...", file=sys.stderr)
    try:
        planned = plan.wait()
        print("\n".join(planned.lines))
        return EXIT_DOES_NOT_FIT if planned.fits is False else 0
    except PlanError as error:
        print(f"error: no plan: {error}", file=sys.stderr)
        return 1
    finally:
        plan.close()
