"""Byte accounting behind the live-bytes tracker: what is live, how high it went, where, and when.

Nothing here knows about tensors: the ledger is told that so many bytes with a label appeared or
went away. It keeps the running total, a stack of peak windows (so that a nested measurement with
its own reset never loses the peak of the one around it), the break-down of the peak by label, and,
if asked, every change in order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Label(NamedTuple):
    """Who allocated some bytes: the phase the program was in, and the operator."""

    phase: str
    op: str


class Event(NamedTuple):
    """One change of the live total, in order of occurrence.

    Attributes:
        serial: number of the storage, unique within one tracker.
        delta_bytes: bytes that appeared (positive) or went away (negative).
        live_bytes: the total after the change.
        label: who allocated the storage (also for its death).
    """

    serial: int
    delta_bytes: int
    live_bytes: int
    label: Label


@dataclass(frozen=True)
class Peak:
    """The highest total within one window, and what made it up.

    Attributes:
        live_bytes: the total at the peak.
        label: the allocation that reached the peak.
        by_label: live bytes at the peak by allocating phase and operator; sums to `live_bytes`.
    """

    live_bytes: int
    label: Label
    by_label: dict[Label, int] = field(repr=False)

    def by_phase(self) -> dict[str, int]:
        """Live bytes at the peak by the phase that allocated them, largest first."""
        return self._summed("phase")

    def by_op(self) -> dict[str, int]:
        """Live bytes at the peak by the operator that allocated them, largest first."""
        return self._summed("op")

    def _summed(self, part: str) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for label, num_bytes in self.by_label.items():
            sums[getattr(label, part)] += num_bytes
        return dict(sums.most_common())


class Window:
    """An open measurement of the peak; `peak` may be read while it is open and after."""

    __slots__ = ("_by_label", "_label", "_ledger", "_live_bytes", "name")

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self.name = name
        self.restart()

    def restart(self) -> None:
        """Begin again at the present total."""
        self._live_bytes = self._ledger.live_bytes
        self._label = Label(self.name, "(start)")
        self._by_label = dict(self._ledger.live_by_label)

    @property
    def peak(self) -> Peak:
        """The peak so far, windows opened within this one included."""
        self._ledger.settle()
        return Peak(self._live_bytes, self._label, dict(self._by_label))

    @property
    def peak_bytes(self) -> int:
        """Highest total in this window so far, windows opened within it included."""
        return self.peak.live_bytes

    def absorb(self, inner: Window) -> None:
        """Take over the peak of a window inside this one where it is higher."""
        if inner._live_bytes > self._live_bytes:
            self._live_bytes = inner._live_bytes
            self._label = inner._label
            self._by_label = inner._by_label


class Ledger:
    """Running total of live bytes with nested peak windows.

    Only the innermost window is updated on an allocation, and a window hands its peak outwards
    when someone asks, when it is reset and when it closes. The break-down of a peak is copied only
    when the total first falls after a new peak, since until then it is the present one.
    """

    def __init__(self, keep_events: bool = False) -> None:
        self.live_bytes = 0
        self.live_by_label: dict[Label, int] = {}
        self.events: list[Event] | None = [] if keep_events else None
        self._windows = [Window(self, "(all)")]
        self._rising = False

    @property
    def root(self) -> Window:
        """The outermost window: from the beginning or from the last reset outside any other."""
        return self._windows[0]

    def open(self, name: str) -> Window:
        """Open a window inside the innermost one."""
        self.settle()
        window = Window(self, name)
        self._windows.append(window)
        return window

    def close(self, window: Window) -> None:
        """Close the innermost window, which must be `window`; its peak counts for the outer one."""
        self.settle()
        innermost = self._windows[-1]
        assert window is innermost, f"window {window.name!r} closed before {innermost.name!r}"
        self._windows.pop()

    def reset(self) -> None:
        """Begin the innermost window again; every window around it keeps what was reached."""
        self.settle()
        self._windows[-1].restart()

    def settle(self) -> None:
        """Bring break-down and outer windows up to date with the innermost window."""
        self._take_breakdown()
        for outer, inner in zip(self._windows[-2::-1], self._windows[:0:-1], strict=True):
            outer.absorb(inner)

    def grow(self, serial: int, num_bytes: int, label: Label) -> None:
        """Count bytes that appeared."""
        self._change(serial, num_bytes, label)
        innermost = self._windows[-1]
        if self.live_bytes > innermost._live_bytes:
            innermost._live_bytes, innermost._label = self.live_bytes, label
            self._rising = True

    def shrink(self, serial: int, num_bytes: int, label: Label) -> None:
        """Count bytes that went away."""
        self._take_breakdown()
        self._change(serial, -num_bytes, label)
        if not self.live_by_label[label]:
            del self.live_by_label[label]

    def _change(self, serial: int, delta_bytes: int, label: Label) -> None:
        self.live_bytes += delta_bytes
        self.live_by_label[label] = self.live_by_label.get(label, 0) + delta_bytes
        if self.events is not None:
            self.events.append(Event(serial, delta_bytes, self.live_bytes, label))

    def _take_breakdown(self) -> None:
        """If the total has been at a new peak until now, remember what made it up."""
        if self._rising:
            self._windows[-1]._by_label = dict(self.live_by_label)
            self._rising = False
