"""The peak of a deep model from two shallow ones, for searches that ask for many peaks.

With blocks all alike, what is live at a given moment of a step grows by the same amount for every
block that is added. A moment is a phase and, in a block, its place counted from the nearer end of
the model. So two dry runs of a few blocks give the peak for any number of them. Plans themselves
are never made this way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from titan_relay.config import RunConfig
from titan_relay.memory.devices import Device
from titan_relay.titan.plan.dry_run import dry_run

_SHALLOW = 5  # two blocks at each end that prefetching treats differently, and one between
_EDGE = 2


def peak_of(run: RunConfig, world_size: int, device: Device) -> int:
    """The peak of any step but the first of rank 0, extrapolated where that is exact."""
    highs = highs_of(run, world_size, device)
    return max(highs.values())


def highs_of(run: RunConfig, world_size: int, device: Device) -> dict[str, int]:
    """The highest moment of each phase, layers named by their place."""
    num_layers = run.model.num_layers
    if not _can_extrapolate(run):
        return _highs(run, num_layers, world_size, device)
    low = _highs(run, _SHALLOW, world_size, device)
    high = _highs(run, _SHALLOW + 1, world_size, device)
    return {place: _line(low, high, place, num_layers) for place in high}


def _can_extrapolate(run: RunConfig) -> bool:
    uniform = run.parallelism.pipeline_parallel_degree == 1
    return uniform and run.model.num_layers > 2 * _SHALLOW + 1


def _highs(run: RunConfig, num_layers: int, world_size: int, device: Device) -> dict[str, int]:
    run = replace(run, model=replace(run.model, num_layers=num_layers))
    memory = dry_run(run, world_size, device)
    highs: dict[str, int] = {}
    for phase, num_bytes in memory.highs.items():
        place = _place(phase, num_layers)
        highs[place] = max(highs.get(place, 0), num_bytes)
    return highs


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


def _line(low: Mapping[str, int], high: Mapping[str, int], place: str, num_layers: int) -> int:
    per_layer = high[place] - low.get(place, high[place])
    return low.get(place, high[place]) + per_layer * (num_layers - _SHALLOW)
