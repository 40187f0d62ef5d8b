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
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter
from typing import TypeVar

from titan_relay.measure.ledger import Event, Label

Group = TypeVar("Group")


class Category(StrEnum):
    """What bytes of a step are for."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    FSDP = "FSDP buffers"
    BLOCK_INPUTS = "block inputs"
    KEPT_ATTENTION = "retained attention"
    KEPT_EXPERTS = "retained experts"
    ATTENTION = "attention working"
    EXPERTS = "experts working"
    LOSS = "logits and loss"
    OTHER = "other"


_IN_BACKWARD = ("recompute", "backward")


@dataclass(frozen=True)
class Mark:
    """From event number `first_event` on the step was in phase `phase`."""

    first_event: int
    phase: str


@dataclass(frozen=True)
class Point:
    """One moment of a step: its phase, the operator, and the bytes live of each `Category`."""

    phase: str
    op: str
    by_category: dict[str, int]

    @property
    def live_bytes(self) -> int:
        return sum(self.by_category.values())


@dataclass(frozen=True)
class StepMemory:
    """What one step of one rank needs.

    Attributes:
        first: the peak of a run's first step. steady: that of every later one.
        rises: for each "direction part" the most that one visit of it rose above where it began;
            "backward block" is a whole layer's backward, recomputation included.
        highs: the highest moment of each phase of the steady timeline.
        host_bytes: host memory that stands in for device memory, at most; in no other figure.
        curve: the highest moment of each of about `num_points` stretches of the steady timeline.
    """

    first: Point
    steady: Point
    rises: dict[str, int]
    highs: dict[str, Point] = field(repr=False)
    host_bytes: int
    curve: tuple[Point, ...] = field(repr=False)


def step_memory(
    events: Sequence[Event],
    marks: Sequence[Mark],
    owners: Mapping[Category, Collection[int]],
    *,
    host_bytes: int = 0,
    num_points: int = 800,
) -> StepMemory:
    """Read one recorded step, from its first event (what was there already) to its last.

    owners: serials of the storages whose owner is known from outside, by category.
    """
    step = _Step(events, marks, owners)
    num_events = max(1, (len(events) - step.start) // num_points)  # of a point of the curve
    return StepMemory(
        first=step.highest(lambda _: "first", steady=False)["first"],
        steady=step.highest(lambda _: "steady")["steady"],
        rises=step.rises(),
        highs=step.highest(step.phase_at),
        host_bytes=host_bytes,
        curve=tuple(step.highest(lambda event: (event - step.start) // num_events).values()),
    )


class _Step:
    """The events of a recorded step, with the category of every change."""

    def __init__(
        self,
        events: Sequence[Event],
        marks: Sequence[Mark],
        owners: Mapping[Category, Collection[int]],
    ) -> None:
        self._events, self._marks = events, marks
        self._starts = [mark.first_event for mark in marks]
        self.start = self._starts[0]
        self._categories = self._find_categories(owners)

    def phase_at(self, event: int) -> str:
        index = bisect.bisect_right(self._starts, event) - 1
        return self._marks[index].phase if index >= 0 else ""

    def highest(
        self, group_of: Callable[[int], Group], *, steady: bool = True
    ) -> dict[Group, Point]:
        """The highest moment of each group of the step's events, by their numbers."""
        highest_bytes: dict[Group, int] = {}
        points: dict[Group, Point] = {}
        for index, totals in self._walk(steady=steady):
            group, live_bytes = group_of(index), sum(totals.values())
            if live_bytes > highest_bytes.get(group, -1):
                highest_bytes[group] = live_bytes
                op = self._events[index].label.op
                points[group] = Point(self.phase_at(index), op, dict(totals))
        return points

    def _walk(self, *, steady: bool) -> Iterator[tuple[int, dict[str, int]]]:
        """Each event's number and the totals after it, on the first or on the steady timeline."""
        changes = list(zip(self._categories, self._events, strict=True))
        totals: dict[str, int] = dict.fromkeys(Category, 0)
        if steady:
            totals[Category.OPTIMIZER] = sum(
                e.delta_bytes for name, e in changes if name == Category.OPTIMIZER
            )
        for index, (category, event) in enumerate(changes):
            if not (steady and category == Category.OPTIMIZER):
                totals[category] += event.delta_bytes
            if index >= self.start:
                yield index, totals

    def rises(self) -> dict[str, int]:
        rises: dict[str, int] = {}
        for visit_of in (_visit, _block_visit):
            visits = itertools.groupby(
                [(visit_of(mark.phase), mark.first_event) for mark in self._marks], itemgetter(0)
            )
            begins = [(name, next(group)[1]) for (name, _), group in visits]
            ends = [first for _, first in begins[1:]] + [len(self._events)]
            for (name, first), end in zip(begins, ends, strict=True):
                if name and first < end:
                    before = self._events[first - 1].live_bytes if first else 0
                    highest = max(event.live_bytes for event in self._events[first:end])
                    rises[name] = max(rises.get(name, 0), highest - before)
        return rises

    def _find_categories(self, owners: Mapping[Category, Collection[int]]) -> list[Category]:
        """The category of every event, by the storage's owner or its life."""
        by_serial = {serial: name for name, serials in owners.items() for serial in serials}
        categories = [Category.OTHER] * len(self._events)
        deaths: dict[int, int] = {}  # by serial, the one that is next
        for index in reversed(range(len(self._events))):
            event = self._events[index]
            if event.delta_bytes < 0:
                deaths[event.serial] = index
                continue
            death = deaths.pop(event.serial, None)
            phase_of_death = "" if death is None else self.phase_at(death)
            name = by_serial.get(event.serial) or _by_life(event.label, phase_of_death)
            categories[index] = name
            if death is not None:
                categories[death] = name
        return categories


def _visit(phase: str) -> tuple[str, str]:
    """A phase's "direction part", and what tells it from the next."""
    return " ".join(phase.split()[:2]), phase


def _block_visit(phase: str) -> tuple[str, str]:
    """As `_visit` for stretches of backward that belong to one layer; two empty ones elsewhere."""
    direction, *_, layer = phase.split()
    is_block = direction in _IN_BACKWARD and layer.isdigit()
    return ("backward block", layer) if is_block else ("", "")


def _by_life(label: Label, phase_of_death: str) -> Category:
    """What a storage is for: where it was made, and whether backward still needed it."""
    direction, _, rest = label.phase.partition(" ")
    part = rest.split(" ")[0]
    if direction == "fsdp" or label.op == "(storage resize)":
        return Category.FSDP
    if part == "loss":
        return Category.LOSS
    kept = direction == "forward" and phase_of_death.split(" ")[0] in _IN_BACKWARD
    if part == "attention":
        return Category.KEPT_ATTENTION if kept else Category.ATTENTION
    if part in ("experts", "dense", "shared"):
        return Category.KEPT_EXPERTS if kept else Category.EXPERTS
    return Category.OTHER
