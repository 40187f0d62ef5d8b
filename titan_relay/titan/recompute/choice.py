"""Decides for `[attention_retention]` what is kept and where: at the start, and for "auto" again
once steps have shown how long attention's parts take and how much memory is left.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchtitan.tools.logging import logger

from titan_relay.config import RunConfig, degrees_of
from titan_relay.private_torch import fake_mode_is_on
from titan_relay.recompute.clock import CallClock
from titan_relay.recompute.host_inputs import HostInputs
from titan_relay.recompute.levels import Level, RetentionPlan, plan_retention, retention_of
from titan_relay.titan.metrics.memory import resident_peak_bytes, usable_memory_bytes
from titan_relay.titan.recompute.block_levels import KERNEL, PROJECTION, Levels
from titan_relay.titan.recompute.cost import (
    Seconds,
    layer_costs,
    log_block_inputs,
    log_plan,
    microbatch_of,
    plan_curves,
)
from titan_relay.units import GIB, in_words

# The first step compiles and makes the optimizer's state: time and memory are those of the second.
_MEASURED_STEP = 2


class RetentionChoice:
    """Sets `levels`; `after_step` must be called on every rank after every step.

    Args:
        itemsize: bytes of the elements that layers compute with.
        local_ranks: processes that share this machine's memory, where there is no device.
    """

    def __init__(
        self,
        run: RunConfig,
        world_size: int,
        levels: Levels,
        *,
        itemsize: int,
        device: torch.device,
        local_ranks: int,
    ) -> None:
        self._section = run.attention_retention
        self._levels, self._device, self._local_ranks = levels, device, local_ranks
        self._microbatch = microbatch_of(run, degrees_of(run, world_size), itemsize)
        self._num_steps = 0
        # A dry run on fake tensors takes no time to measure and has no memory to fill.
        is_dry = fake_mode_is_on()
        self._is_open = not is_dry and "auto" in (self._section.mode, self._section.block_inputs)
        self._set(self._first_plan())
        log_block_inputs(run, self._microbatch, len(levels.shapes))

    def curves(self) -> dict[str, float]:
        """The plan in numbers."""
        return plan_curves(self.plan)

    def _first_plan(self) -> RetentionPlan:
        costs = layer_costs(self._levels.shapes, self._microbatch)
        section, num_alive = self._section, self._microbatch.num_alive
        if section.mode != "auto":
            given: dict[int, Level] = {
                cost.layer: section.mode if section.layers is None else section.layers[cost.layer]
                for cost in costs
            }
            return retention_of(costs, given, num_alive)
        if self._is_open:
            self._levels.clock = CallClock()
        budget_bytes = 0.0 if section.budget_gib == "auto" else section.budget_gib * GIB
        return plan_retention(costs, budget_bytes, num_alive)

    def after_step(self) -> None:
        """Decide once, after the second step, by the clock and the memory that is left."""
        if not self._is_open:
            return
        self._num_steps += 1
        clock = self._levels.clock
        if self._num_steps < _MEASURED_STEP:
            if clock is not None:
                clock.reset()
            return
        self._is_open, self._levels.clock = False, None
        left_bytes = self._tightest(self._left_bytes())
        if self._section.block_inputs == "auto" and self._levels.host is not None:
            left_bytes -= self._take_inputs_back(self._levels.host, left_bytes)
        if clock is not None:
            self._choose_levels(clock, left_bytes)

    def _take_inputs_back(self, host: HostInputs, left_bytes: float) -> int:
        buffers = host.buffers
        wanted_bytes = buffers.allocated_bytes
        freed_bytes = buffers.shrink(int(left_bytes))
        logger.info(
            f"Block inputs: {in_words(left_bytes)} are left on the device; of "
            f"{in_words(wanted_bytes)} in host memory {in_words(freed_bytes)} come back"
        )
        return freed_bytes

    def _choose_levels(self, clock: CallClock, left_bytes: float) -> None:
        """By what the slowest rank measured; bytes are those of the tightest rank."""
        section = self._section
        seconds = clock.seconds()
        num_layers = max(1, clock.num_calls.get(KERNEL, 0))  # over all layers and microbatches
        kernel, projections = (
            -self._tightest(-seconds.get(kind, 0.0) / num_layers) for kind in (KERNEL, PROJECTION)
        )
        budget_bytes = self._tightest(
            left_bytes if section.budget_gib == "auto" else section.budget_gib * GIB
        )
        logger.info(
            f"Attention of a layer takes {1000 * kernel:.3f} ms in its kernel and "
            f"{1000 * projections:.3f} ms in its projections; "
            f"{in_words(budget_bytes)} may be kept of them"
        )
        costs = layer_costs(self._levels.shapes, self._microbatch, Seconds(kernel, projections))
        self._set(plan_retention(costs, budget_bytes, self._microbatch.num_alive))

    def _tightest(self, value: float) -> float:
        """The least of all ranks'."""
        least = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return float(least.item())

    def _left_bytes(self) -> float:
        """What the peak of a step leaves of the memory, less the margin."""
        if self._device.type == "cuda":
            _, total_bytes = torch.cuda.mem_get_info(self._device)
            peak_bytes = torch.cuda.max_memory_reserved(self._device)
        else:
            total_bytes = usable_memory_bytes() // self._local_ranks
            peak_bytes = resident_peak_bytes()
        return max(0.0, total_bytes * (1 - self._section.safety_margin) - peak_bytes)

    def _set(self, plan: RetentionPlan) -> None:
        self.plan = plan
        self._levels.of_layer.update(plan.levels)
        log_plan(plan)
