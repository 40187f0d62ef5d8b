"""The peak of a deep model from two shallow ones, for searches that ask for many peaks.

With blocks all alike but those near the ends, what is live at a given moment of a step grows by the
same amount for every block that is added. A moment is a phase and, in a block, its place counted
from the nearer end of the model. So two dry runs of a few blocks give the peak for any number of
them. Plans themselves are never made this way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from titan_relay.config import RunConfig
from titan_relay.measure.devices import Device
from titan_relay.measure.step_memory import Point
from titan_relay.titan.plan.dry_run import dry_run
from titan_relay.units import GIB

_BACK = 1  # blocks at the end that prefetching treats differently from those between

Bytes = Mapping[str, int]  # by category


@dataclass(frozen=True)
class Moment:
    """The highest moment of a step.

    place: its phase, the layer counted from the nearer end, such as "backward experts first + 0".
    host_bytes: host memory that the step takes.
    """

    place: str
    by_category: Bytes
    host_bytes: int

    @property
    def live_bytes(self) -> int:
        return sum(self.by_category.values())


def peak_of(
    run: RunConfig, world_size: int, device: Device, *, rank: int = 0, skew: float = 1.0
) -> Moment:
    """The peak of any step but the first, extrapolated where that is exact; see `dry_run`."""

    def highs_of(num_layers: int) -> tuple[dict[str, Bytes], int]:
        shallow = replace(run, model=replace(run.model, num_layers=num_layers))
        memory = dry_run(shallow, world_size, device, rank=rank, skew=skew)
        return _by_place(memory.highs, num_layers, _front(run)), memory.host_bytes

    num_layers = run.model.num_layers
    shallow = _front(run) + 1 + _BACK
    if not _can_extrapolate(run, shallow):
        return _highest(*highs_of(num_layers))
    low, low_host = highs_of(shallow)
    high, high_host = highs_of(shallow + 1)
    steps = num_layers - shallow
    highs = {place: _line(low, high, place, steps) for place in high}
    host_bytes = low_host + (high_host - low_host) * steps
    if host_bytes > (run.attention_retention.host_budget_gib or 0.0) * GIB:
        # Some inputs stay on the device then, which shallow models do not show.
        return _highest(*highs_of(num_layers))
    return _highest(highs, host_bytes)


def _highest(highs: Mapping[str, Bytes], host_bytes: int) -> Moment:
    place = max(highs, key=lambda each: sum(highs[each].values()))
    return Moment(place, highs[place], host_bytes)


def _front(run: RunConfig) -> int:
    """Blocks at the beginning that are unlike those between: dense ones with the block after them,
    or the first, because prefetching treats it differently."""
    num_dense = run.model.num_dense_layers
    return num_dense + 1 if num_dense else 1


def _can_extrapolate(run: RunConfig, shallow: int) -> bool:
    """Whether all blocks but those at the ends are alike, and there are enough of them to save."""
    retention = run.attention_retention
    alike = retention.layers is None and (retention.mode != "auto" or not retention.budget_gib)
    one_stage = run.parallelism.pipeline_parallel_degree == 1
    return alike and one_stage and run.model.num_layers > 2 * shallow + 1


def _by_place(phases: Mapping[str, Point], num_layers: int, front: int) -> dict[str, Bytes]:
    """The highest moment of each phase by place."""
    highs: dict[str, Bytes] = {}
    for phase, point in sorted(phases.items(), key=lambda item: -item[1].live_bytes):
        highs.setdefault(_place(phase, num_layers, front), point.by_category)
    return highs


def _place(phase: str, num_layers: int, front: int) -> str:
    *words, last = phase.split()
    if not last.isdigit():
        return phase
    layer = int(last)
    if layer < front:
        where = f"first + {layer}"
    elif num_layers - layer <= _BACK:
        where = f"last - {num_layers - 1 - layer}"
    else:
        where = "middle"
    return f"{' '.join(words)} {where}"


def _line(low: Mapping[str, Bytes], high: Mapping[str, Bytes], place: str, steps: int) -> Bytes:
    start = low.get(place, high[place])
    return {name: a + (high[place][name] - a) * steps for name, a in start.items()}
