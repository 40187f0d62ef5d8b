"""`train.py --plan`: the plan of a run on this machine's device, and no run."""

from __future__ import annotations

import sys

from titan_relay.config import RunConfig
from titan_relay.titan.plan.background import BackgroundPlan, PlanError, Request
from titan_relay.titan.plan.watch import this_device


def print_plan(run: RunConfig, world_size: int) -> int:
    """Print the plan of rank 0; returns the exit code."""
    plan = BackgroundPlan(Request(run, world_size, 0, this_device()), low_priority=False)
    try:
        print("\n".join(plan.wait().lines))
        return 0
    except PlanError as error:
        print(f"error: no plan: {error}", file=sys.stderr)
        return 1
    finally:
        plan.close()
