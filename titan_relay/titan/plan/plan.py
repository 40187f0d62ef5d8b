"""The plan of a run: what one rank needs, what the relay will do, and whether it fits a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from titan_relay.config import RunConfig, degrees_of
from titan_relay.measure.devices import Device
from titan_relay.measure.step_memory import StepMemory
from titan_relay.titan.plan.dry_run import dry_run
from titan_relay.titan.recompute.choice import run_after_choice
from titan_relay.titan.train.relay_setup import ExpectedRelay, expected_relay


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it starts.

    Attributes:
        memory: one rank's step under balanced routing (or the skew asked for), once
            `[attention_retention]` has decided by the memory that is left.
        start: a step before that, the first two of a process; often the same.
        worst_bytes: the same rank's peak if every token of every rank chooses its experts; None
            if it was not asked for. The relay's does not depend on the routing.
        relay: which ring runs and what it works with; None without one.
    """

    run: RunConfig
    world_size: int
    rank: int
    device: Device
    memory: StepMemory
    start: StepMemory
    worst_bytes: int | None
    relay: ExpectedRelay | None

    @property
    def peak_bytes(self) -> int:
        """The peak of any step, before the decision and after it."""
        return max(_highest(self.memory), _highest(self.start))

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within what the device has for live tensors; None on CPU."""
        usable_bytes = self.device.usable_bytes
        return None if usable_bytes is None else self.peak_bytes <= usable_bytes


def _highest(memory: StepMemory) -> int:
    """The first step of a run needs less than others, but for what only it does."""
    return max(memory.steady.live_bytes, memory.first.live_bytes)


def plan_run(
    run: RunConfig,
    world_size: int,
    device: Device,
    *,
    rank: int = 0,
    skew: float = 1.0,
    worst: bool = True,
    watch: Callable[[str], None] | None = None,
) -> Plan:
    """Plan a valid run; see `dry_run` for the arguments. `worst`: also look at the worst routing.

    Raises:
        RuntimeError: this process is in a process group already.
    """
    memory = start = dry_run(run, world_size, device, rank=rank, skew=skew, watch=watch)
    later = _after_choice(run, world_size, start, device)
    if later is not None:
        memory = dry_run(later, world_size, device, rank=rank, skew=skew, watch=watch)
    worst_bytes: int | None = max(_highest(memory), _highest(start))
    if run.relay.dispatcher == "alltoall" and degrees_of(run, world_size).ep > 1:
        worst_bytes = None
        if worst:
            at_worst = dry_run(run, world_size, device, rank=rank, skew=math.inf, watch=watch)
            worst_bytes = _highest(at_worst)
    relay = expected_relay(run, world_size, for_cpu=device.is_cpu)
    return Plan(run, world_size, rank, device, memory, start, worst_bytes, relay)


def _after_choice(
    run: RunConfig, world_size: int, start: StepMemory, device: Device
) -> RunConfig | None:
    if device.usable_bytes is None or device.capacity_bytes is None:
        return None
    within_margin = device.capacity_bytes * (1 - run.attention_retention.safety_margin)
    return run_after_choice(run, world_size, start, min(device.usable_bytes, within_margin))
