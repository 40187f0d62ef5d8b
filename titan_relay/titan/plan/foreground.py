"""`train.py --plan`: the plan of a run on this machine's device, and no run."""

from __future__ import annotations

import sys

from titan_relay.config import RunConfig
from titan_relay.titan.plan.background import BackgroundPlan, PlanError, Request
from titan_relay.titan.plan.watch import this_device

EXIT_DOES_NOT_FIT = 1


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
