"""Decides for `[attention_retention]` what is kept and where: at the start, and for "auto" again
once steps have shown how long attention's parts take and how much memory is left.

`run_after_choice` foretells the second decision from a step's memory alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.logging import logger

from titan_relay.config import RunConfig, degrees_of
from titan_relay.measure.step_memory import StepMemory
from titan_relay.private_torch import fake_mode_is_on
from titan_relay.recompute.clock import CallClock
from titan_relay.recompute.host_inputs import HostInputs
from titan_relay.recompute.levels import ChosenLevels, Level, choose_levels
from titan_relay.titan.metrics.memory import resident_peak_bytes, usable_memory_bytes
from titan_relay.titan.recompute.block_levels import KERNEL, PROJECTION, Levels
from titan_relay.titan.recompute.cost import (
    Microbatch,
    Seconds,
    block_input_bytes,
    layer_costs,
    microbatch_of,
)
from titan_relay.units import GIB, in_mib, in_words

_LEVELS: tuple[Level, ...] = get_args(Level)
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
        self.levels, self._device, self._local_ranks = levels, device, local_ranks
        self._microbatch = microbatch_of(run, degrees_of(run, world_size), itemsize)
        self._num_steps = 0
        # A dry run on fake tensors takes no time to measure and has no memory to fill.
        is_dry = fake_mode_is_on()
        self._is_open = not is_dry and "auto" in (self._section.mode, self._section.block_inputs)
        self._set(self._first_choice())
        _log_block_inputs(run, self._microbatch, len(levels.shapes))

    def curves(self) -> dict[str, float]:
        """The choice in numbers."""
        counts = {f"retention/layers_{each}": float(self.chosen.count(each)) for each in _LEVELS}
        return {"retention/bytes": float(self.chosen.num_bytes), **counts}

    def _first_choice(self) -> ChosenLevels:
        costs = layer_costs(self.levels.shapes, self._microbatch)
        section, num_alive = self._section, self._microbatch.num_alive
        if section.mode != "auto":
            given: dict[int, Level] = {
                cost.layer: section.mode if section.layers is None else section.layers[cost.layer]
                for cost in costs
            }
            return ChosenLevels.of(costs, given, num_alive)
        if self._is_open:
            self.levels.clock = CallClock()
        budget_bytes = 0.0 if section.budget_gib == "auto" else section.budget_gib * GIB
        return choose_levels(costs, budget_bytes, num_alive)

    def after_step(self) -> None:
        """Decide once, after the second step, by the clock and the memory that is left."""
        if not self._is_open:
            return
        self._num_steps += 1
        clock = self.levels.clock
        if self._num_steps < _MEASURED_STEP:
            if clock is not None:
                clock.reset()
            return
        self._is_open, self.levels.clock = False, None
        left_bytes = self._tightest(self._left_bytes())
        if self._section.block_inputs == "auto" and self.levels.host is not None:
            left_bytes -= self._take_inputs_back(self.levels.host, left_bytes)
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
        costs = layer_costs(self.levels.shapes, self._microbatch, Seconds(kernel, projections))
        self._set(choose_levels(costs, budget_bytes, self._microbatch.num_alive))

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

    def _set(self, chosen: ChosenLevels) -> None:
        self.chosen = chosen
        self.levels.of_layer.update(chosen.of_layer)
        _log_levels(chosen)


def _log_levels(chosen: ChosenLevels) -> None:
    """Say what is kept, in a form that can be given as `attention_retention.layers`."""
    counts = ", ".join(f"{chosen.count(level)} {level}" for level in _LEVELS if chosen.count(level))
    logger.info(f"Attention kept for backward: {in_mib(chosen.num_bytes)}; layers: {counts}")
    if len(set(chosen.of_layer.values())) > 1:
        listed = ", ".join(f'"{level}"' for _, level in sorted(chosen.of_layer.items()))
        logger.info(f"The same again: attention_retention.layers = [{listed}]")


def _log_block_inputs(run: RunConfig, microbatch: Microbatch, num_layers: int) -> None:
    """Say how many of this rank's block inputs have room on the host."""
    if run.attention_retention.host_budget_gib is None:
        return
    unit_bytes = block_input_bytes(run, microbatch)
    wanted = num_layers * microbatch.num_alive
    fitting = min(wanted, int(run.attention_retention.host_budget_gib * GIB / unit_bytes))
    logger.info(
        f"Block inputs in host memory: {fitting} of {wanted}, {in_mib(fitting * unit_bytes)}"
    )


def run_after_choice(
    run: RunConfig, world_size: int, start: StepMemory, usable_bytes: float
) -> RunConfig | None:
    """The run with numbers in the place of "auto" as memory will decide; None if it stays.

    Args:
        start: a step before the decision: nothing of attention is kept, and block inputs are on
            the host.
        usable_bytes: what tensors may have of the device once `safety_margin` is left free.
    """
    retention = run.attention_retention
    spends = retention.mode == "auto" and retention.budget_gib == "auto"
    takes_back = retention.block_inputs == "auto" and start.host_bytes > 0
    left_bytes = int(usable_bytes) - start.steady.live_bytes
    if run.relay.dispatcher != "relay" or not (spends or takes_back) or left_bytes <= 0:
        return None
    if takes_back:
        itemsize = TORCH_DTYPE_MAP[run.training.mixed_precision_param].itemsize
        microbatch = microbatch_of(run, degrees_of(run, world_size), itemsize)
        unit_bytes = block_input_bytes(run, microbatch)
        back_bytes = min(start.host_bytes, left_bytes // unit_bytes * unit_bytes)
        left_bytes -= back_bytes
        host_gib = (start.host_bytes - back_bytes) / GIB
        retention = replace(
            retention,
            block_inputs="host" if host_gib else "device",
            host_budget_gib=host_gib or None,
        )
    if spends:
        retention = replace(retention, budget_gib=left_bytes / GIB)
    return replace(run, attention_retention=retention)
