"""From every allocation of one training step to what the step needs: how much, when, for what.

The recorder of a step hands over the tracker's events and, for each phase, the event with which it
began. A phase's name is "direction part layer", such as "backward attention 3"; direction is
forward, recompute or backward, and parts without a layer leave it out ("forward loss").

Two timelines come out of one recorded step. In the first step of a run the optimizer's state does
not exist until its update; from the second step on it is there all the time. The second one,
`steady`, is the first with the state moved to the front.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from titan_relay.measure.ledger import Event, Label

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
FSDP = "FSDP buffers"
BLOCK_INPUTS = "block inputs"
KEPT_ATTENTION = "retained attention"
KEPT_EXPERTS = "retained experts"
ATTENTION = "attention working"
EXPERTS = "experts working"
LOSS = "logits and loss"
OTHER = "other"
CATEGORIES = (
    PARAMETERS,
    OPTIMIZER,
    GRADIENTS,
    FSDP,
    BLOCK_INPUTS,
    KEPT_ATTENTION,
    KEPT_EXPERTS,
    ATTENTION,
    EXPERTS,
    LOSS,
    OTHER,
)
_IN_BACKWARD = ("recompute", "backward")


@dataclass(frozen=True)
class Mark:
    """From event number `first_event` on the step was in phase `phase`."""

    first_event: int
    phase: str


@dataclass(frozen=True)
class Owners:
    """Serials of the storages whose owner is known from outside, by category."""

    parameters: frozenset[int]
    optimizer: frozenset[int]
    gradients: frozenset[int]
    block_inputs: frozenset[int]


@dataclass(frozen=True)
class StepPeak:
    """The highest moment of a step."""

    live_bytes: int
    event: int
    phase: str
    op: str
    by_category: dict[str, int]


@dataclass(frozen=True)
class StepMemory:
    """What one step of one rank needs.

    Attributes:
        first: the peak of a run's first step. steady: that of every later one.
        rises: for each "direction part" the most that one visit of it rose above where it began;
            "backward block" is a whole layer's backward, recomputation included.
        highs: the highest moment of each phase of the steady timeline, by category.
        host_bytes: host memory that stands in for device memory, at most; in no other figure.
        curve: the steady timeline, at most `num_points` points.
    """

    first: StepPeak
    steady: StepPeak
    rises: dict[str, int]
    highs: dict[str, tuple[int, ...]] = field(repr=False)
    host_bytes: int
    curve: tuple[Point, ...] = field(repr=False)


@dataclass(frozen=True)
class Point:
    """One moment of the timeline: the highest of a stretch of events."""

    phase: str
    by_category: tuple[int, ...]  # in the order of CATEGORIES

    @property
    def live_bytes(self) -> int:
        return sum(self.by_category)


def step_memory(
    events: Sequence[Event],
    marks: Sequence[Mark],
    owners: Owners,
    *,
    host_bytes: int = 0,
    num_points: int = 800,
) -> StepMemory:
    """Read one recorded step, from its first event (what was there already) to its last."""
    steady = list(_steady(events, owners, _step_start(marks)))
    first = _Replay(events, events, marks, owners)
    later = _Replay(steady, events, marks, owners)
    return StepMemory(
        first=first.peak(),
        steady=later.peak(),
        rises=first.rises(),
        highs=later.highs(),
        host_bytes=host_bytes,
        curve=later.curve(num_points),
    )


def _step_start(marks: Sequence[Mark]) -> int:
    return marks[0].first_event


def _steady(events: Sequence[Event], owners: Owners, start: int) -> Iterable[Event]:
    """The events with the optimizer's state alive from the start."""
    state_bytes = sum(e.delta_bytes for e in events if e.serial in owners.optimizer)
    extra_bytes = 0
    for index, event in enumerate(events):
        if index == start:
            extra_bytes = state_bytes
        if event.serial in owners.optimizer:
            extra_bytes -= event.delta_bytes if index >= start else 0
            yield event._replace(delta_bytes=0, live_bytes=event.live_bytes + extra_bytes)
        else:
            yield event._replace(live_bytes=event.live_bytes + extra_bytes)


class _Replay:
    """Walks one timeline and knows the category of every change."""

    def __init__(
        self,
        timeline: Sequence[Event],
        events: Sequence[Event],
        marks: Sequence[Mark],
        owners: Owners,
    ) -> None:
        self._timeline = timeline
        self._marks = marks
        self._starts = [mark.first_event for mark in marks]
        self._start = _step_start(marks)
        self._categories = _categories(events, self._phase_at, owners)
        self._steady_bytes = sum(e.delta_bytes for e in events if e.serial in owners.optimizer)
        self._is_steady = timeline is not events

    def _phase_at(self, event: int) -> str:
        index = bisect.bisect_right(self._starts, event) - 1
        return self._marks[index].phase if index >= 0 else ""

    def _walk(self) -> Iterable[tuple[int, Event, list[int]]]:
        totals = [0] * len(CATEGORIES)
        for index, event in enumerate(self._timeline):
            totals[self._categories[index]] += event.delta_bytes
            if index == self._start and self._is_steady:
                totals[CATEGORIES.index(OPTIMIZER)] += self._steady_bytes
            yield index, event, totals

    def peak(self) -> StepPeak:
        best_bytes, best_index, best = -1, 0, [0] * len(CATEGORIES)
        for index, event, totals in self._walk():
            if index >= self._start and event.live_bytes > best_bytes:
                best_bytes, best_index, best = event.live_bytes, index, list(totals)
        by_category = dict(zip(CATEGORIES, best, strict=True))
        op = self._timeline[best_index].label.op
        return StepPeak(best_bytes, best_index, self._phase_at(best_index), op, by_category)

    def highs(self) -> dict[str, tuple[int, ...]]:
        highest: dict[str, int] = {}
        highs: dict[str, tuple[int, ...]] = {}
        for index, event, totals in self._walk():
            phase = self._phase_at(index)
            if index >= self._start and event.live_bytes > highest.get(phase, -1):
                highest[phase], highs[phase] = event.live_bytes, tuple(totals)
        return highs

    def rises(self) -> dict[str, int]:
        rises: dict[str, int] = {}
        for visits in (_visits(self._marks), _block_visits(self._marks)):
            for name, first, last in visits:
                end = len(self._timeline) if last is None else last
                if first >= end:
                    continue
                before = self._timeline[first - 1].live_bytes if first else 0
                highest = max(event.live_bytes for event in self._timeline[first:end])
                rises[name] = max(rises.get(name, 0), highest - before)
        return rises

    def curve(self, num_points: int) -> tuple[Point, ...]:
        stretch = max(1, (len(self._timeline) - self._start) // num_points)
        points: list[Point] = []
        highest = -1
        for index, event, totals in self._walk():
            if index < self._start:
                continue
            if (index - self._start) % stretch == 0:
                points.append(Point("", ()))
                highest = -1
            if event.live_bytes > highest:
                highest = event.live_bytes
                points[-1] = Point(self._phase_at(index), tuple(totals))
        return tuple(points)


def _visits(marks: Sequence[Mark]) -> Iterable[tuple[str, int, int | None]]:
    """Each phase's "direction part", first event and the event after its last."""
    for index, mark in enumerate(marks):
        last = marks[index + 1].first_event if index + 1 < len(marks) else None
        yield " ".join(mark.phase.split()[:2]), mark.first_event, last


def _block_visits(marks: Sequence[Mark]) -> Iterable[tuple[str, int, int | None]]:
    """Each stretch of backward that belongs to one layer."""
    layer, first = "", 0
    for mark in marks:
        direction, *_, here = mark.phase.split()
        here = here if direction in _IN_BACKWARD and here.isdigit() else ""
        if here != layer:
            if layer:
                yield "backward block", first, mark.first_event
            layer, first = here, mark.first_event


def _categories(events: Sequence[Event], phase_at: object, owners: Owners) -> list[int]:
    """The category of every event, by the storage's owner or its life."""
    known = {
        PARAMETERS: owners.parameters,
        OPTIMIZER: owners.optimizer,
        GRADIENTS: owners.gradients,
        BLOCK_INPUTS: owners.block_inputs,
    }
    by_serial = {serial: name for name, serials in known.items() for serial in serials}
    categories = [0] * len(events)
    open_events: dict[int, int] = {}
    lives: list[tuple[int, int | None]] = []
    for index, event in enumerate(events):
        if event.delta_bytes > 0:
            open_events[event.serial] = index
        else:
            lives.append((open_events.pop(event.serial), index))
    lives += [(birth, None) for birth in open_events.values()]
    for birth, death in lives:
        event = events[birth]
        name = by_serial.get(event.serial)
        if name is None:
            name = _by_life(event.label, None if death is None else phase_at(death))  # type: ignore[operator]
        categories[birth] = CATEGORIES.index(name)
        if death is not None:
            categories[death] = categories[birth]
    return categories


def _by_life(label: Label, phase_of_death: str | None) -> str:
    """What a storage is for: where it was made, and whether backward still needed it."""
    direction, _, rest = label.phase.partition(" ")
    part = rest.split(" ")[0]
    if direction == "fsdp" or label.op == "(storage resize)":
        return FSDP
    if part == "loss":
        return LOSS
    outlives_forward = phase_of_death is not None and phase_of_death.split(" ")[0] in _IN_BACKWARD
    kept = direction == "forward" and outlives_forward
    if part == "attention":
        return KEPT_ATTENTION if kept else ATTENTION
    if part in ("experts", "dense", "shared"):
        return KEPT_EXPERTS if kept else EXPERTS
    return OTHER
