"""The peak of a deep model from two shallow ones, for searches that ask for many peaks.

With blocks all alike, what is live at a given moment of a step grows by the same amount for every
block that is added. A moment is a phase and, in a block, its place counted from the nearer end of
the model. So two dry runs of a few blocks give the peak for any number of them. Plans themselves
are never made this way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from titan_relay.config import RunConfig
from titan_relay.memory.devices import Device
from titan_relay.memory.step_memory import CATEGORIES
from titan_relay.titan.plan.dry_run import dry_run

_SHALLOW = 3  # a block at each end, which prefetching treats differently, and one between
_EDGE = 1
_GIB = 2**30

Bytes = tuple[int, ...]  # by category


@dataclass(frozen=True)
class Moment:
    """The highest moment of a step.

    place: its phase, the layer counted from the nearer end, such as "backward experts first + 0".
    host_bytes: host memory that the step takes.
    """

    place: str
    by_category: dict[str, int]
    host_bytes: int

    @property
    def live_bytes(self) -> int:
        return sum(self.by_category.values())


def peak_of(run: RunConfig, world_size: int, device: Device) -> Moment:
    """The peak of any step but the first of rank 0, extrapolated where that is exact."""
    num_layers = run.model.num_layers
    if not _can_extrapolate(run):
        return _highest(*_highs(run, num_layers, world_size, device))
    low, low_host = _highs(run, _SHALLOW, world_size, device)
    high, high_host = _highs(run, _SHALLOW + 1, world_size, device)
    steps = num_layers - _SHALLOW
    highs = {place: _line(low, high, place, steps) for place in high}
    host_bytes = low_host + (high_host - low_host) * steps
    if host_bytes > (run.attention_retention.host_budget_gib or 0.0) * _GIB:
        # Some inputs stay on the device then, which shallow models do not show.
        return _highest(*_highs(run, num_layers, world_size, device))
    return _highest(highs, host_bytes)


def _highest(highs: Mapping[str, Bytes], host_bytes: int) -> Moment:
    place = max(highs, key=lambda each: sum(highs[each]))
    return Moment(place, dict(zip(CATEGORIES, highs[place], strict=True)), host_bytes)


def _can_extrapolate(run: RunConfig) -> bool:
    """Whether all blocks but those at the ends are alike, and there are enough of them."""
    retention = run.attention_retention
    alike = retention.layers is None and (retention.mode != "auto" or not retention.budget_gib)
    one_stage = run.parallelism.pipeline_parallel_degree == 1
    return alike and one_stage and run.model.num_layers > 2 * _SHALLOW + 1


def _highs(
    run: RunConfig, num_layers: int, world_size: int, device: Device
) -> tuple[dict[str, Bytes], int]:
    """The highest moment of each phase by place, and host bytes."""
    run = replace(run, model=replace(run.model, num_layers=num_layers))
    memory = dry_run(run, world_size, device)
    highs: dict[str, Bytes] = {}
    for phase, here in memory.highs.items():
        place = _place(phase, num_layers)
        highs[place] = max(highs.get(place, here), here, key=sum)
    return highs, memory.host_bytes


def _place(phase: str, num_layers: int) -> str:
    *words, last = phase.split()
    if not last.isdigit():
        return phase
    layer = int(last)
    if layer < _EDGE:
        where = f"first + {layer}"
    elif num_layers - layer <= _EDGE:
        where = f"last - {num_layers - 1 - layer}"
    else:
        where = "middle"
    return f"{' '.join(words)} {where}"


def _line(low: Mapping[str, Bytes], high: Mapping[str, Bytes], place: str, steps: int) -> Bytes:
    start = low.get(place, high[place])
    return tuple(a + (b - a) * steps for a, b in zip(start, high[place], strict=True))
