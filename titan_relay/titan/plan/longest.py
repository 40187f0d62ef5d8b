"""The longest sequence whose peak stays within a limit.

A step's memory grows nearly in proportion to the sequence, with jumps where a choice changes (which
ring, how many slices). So the search draws a line through the nearest lengths known to fit and not
to fit, and tries where it meets the limit; every third time it tries half-way, for the jumps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from titan_relay.config import Degrees, RunConfig
from titan_relay.config.degrees import sequence_multiple

_MOST_TRIES = 24
_CLOSE_ENOUGH = 1 / 100
_GRAIN = 128  # tokens of one rank


@dataclass(frozen=True)
class Tried:
    """A sequence length, its peak, and what the peak is made of in words."""

    seq_len: int
    peak_bytes: int
    made_of: str


_ORIGIN = Tried(0, 0, "")


def longest(peak: Callable[[int], Tried], unit: int, limit_bytes: int, first: int) -> Tried | None:
    """The longest multiple of `unit` within the limit; None if not even one unit is.

    To within one unit or 1%, whichever is more.
    """
    fits: Tried | None = None
    before: Tried | None = None  # what fitted before that
    too_long: Tried | None = None
    length = max(unit, first // unit * unit)
    for number in range(_MOST_TRIES):
        tried = peak(length)
        if tried.peak_bytes <= limit_bytes:
            before, fits = fits, tried
        else:
            too_long = tried
        halve = number % 3 == 2
        if too_long is None:
            length = _next_longer(before, tried, unit, limit_bytes)
        else:
            length = _next_between(fits, too_long, unit, limit_bytes, halve=halve)
        if length == 0:
            break
    return fits


def longest_of(
    peak: Callable[[int], Tried], run: RunConfig, degrees: Degrees, limit_bytes: int, first: int
) -> Tried | None:
    """`longest` for a run: in steps of 128 tokens a rank or, where not even one step fits, of as
    few as layout and loss allow."""
    finest = unit_of(run, degrees)
    coarse = math.lcm(finest, _GRAIN * degrees.cp * degrees.tp)
    found = longest(peak, coarse, limit_bytes, first)
    if found is None and finest < coarse:
        found = longest(peak, finest, limit_bytes, coarse // 2)
    return found


def _next_longer(before: Tried | None, fits: Tried, unit: int, limit_bytes: int) -> int:
    """Where the line through the two longest that fit meets the limit, at most 4 times as long."""
    lowest = fits.seq_len + unit
    return _along_line(before or _ORIGIN, fits, limit_bytes, unit, lowest, 4 * lowest)


def _next_between(
    fits: Tried | None, too_long: Tried, unit: int, limit_bytes: int, *, halve: bool
) -> int:
    """A length between what fits and what does not; 0 when there is none."""
    low = fits or _ORIGIN
    if too_long.seq_len - low.seq_len <= max(unit, low.seq_len * _CLOSE_ENOUGH):
        return 0
    lowest, highest = low.seq_len + unit, too_long.seq_len - unit
    if halve:
        return max(lowest, (low.seq_len + too_long.seq_len) // 2 // unit * unit)
    return _along_line(low, too_long, limit_bytes, unit, lowest, highest)


def _along_line(
    one: Tried, two: Tried, limit_bytes: int, unit: int, lowest: int, highest: int
) -> int:
    slope = (two.peak_bytes - one.peak_bytes) / (two.seq_len - one.seq_len)
    meets = one.seq_len + (limit_bytes - one.peak_bytes) / max(slope, 1e-9)
    return max(lowest, min(highest, int(meets) // unit * unit))


def unit_of(run: RunConfig, degrees: Degrees) -> int:
    """What sequence lengths must be multiples of, for layout and loss."""
    multiple, _ = sequence_multiple(run, degrees)
    chunks = 1
    if run.loss.name == "chunked_cross_entropy" and run.loss.num_chunks != "auto":
        chunks = run.loss.num_chunks
    return math.lcm(multiple, chunks * degrees.cp * degrees.tp)
