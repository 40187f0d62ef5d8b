"""The longest sequence of a run whose peak stays within a limit, searched over plans or real steps.

A step's memory grows nearly in proportion to the sequence, with jumps where a choice changes (which
ring, how many slices). So the search draws a line through the nearest lengths known to fit and not
to fit, and tries where it meets the limit; every third time it tries half-way, for the jumps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter

import torch.distributed as dist

from titan_relay.config import Degrees, RunConfig, degrees_of, with_length
from titan_relay.config.degrees import sequence_multiple
from titan_relay.local_ranks import largest, on_ranks, say
from titan_relay.measure.devices import Device
from titan_relay.titan.plan.extrapolate import peak_of
from titan_relay.titan.plan.measure import measure_steps
from titan_relay.units import in_words

_NUM_OWNERS = 3
_MOST_TRIES = 24
_CLOSE_ENOUGH = 1 / 100
_GRAIN = 128  # tokens of one rank


@dataclass(frozen=True)
class LongestSequence:
    """max_seq_len: 0 if not even the shortest fits; limited_by: what the peak is made of.

    bytes_per_token: growth between the shortest and the longest sequence tried; 0 if only one was.
    """

    variant: str
    max_seq_len: int
    peak_bytes: int
    limited_by: str
    bytes_per_token: float = 0.0


def search_plans(
    runs: Mapping[str, RunConfig], world_size: int, device: Device
) -> list[LongestSequence]:
    """The longest sequence of each run, by name, on `device`, which has a limit."""
    limit_bytes = device.usable_bytes
    assert limit_bytes is not None, "a CPU has no limit"

    def plan(run: RunConfig) -> Tried:
        moment = peak_of(run, world_size, device)
        owners = _owners(moment.place, moment.by_category, moment.host_bytes)
        return Tried(run.training.seq_len, moment.live_bytes, owners)

    found: list[LongestSequence] = []
    first = 0
    for number, (name, run) in enumerate(runs.items(), 1):
        say(f"{name} ({number} of {len(runs)}), limit {in_words(limit_bytes)}")
        found.append(_search(name, run, world_size, limit_bytes, plan, first))
        first = found[-1].max_seq_len or first
    return found


def search_steps(
    runs: Mapping[str, RunConfig], world_size: int, budget_bytes: int
) -> list[LongestSequence]:
    """The longest sequence of each run, by name, whose largest rank stays within the budget of live
    tensor bytes: real steps on CPU ranks, which this starts."""
    found: list[LongestSequence] = on_ranks(
        _search_all, dict(runs), budget_bytes, world_size=world_size
    )
    return found


def _search_all(runs: Mapping[str, RunConfig], budget_bytes: int) -> list[LongestSequence]:
    return [search_on_ranks(name, run, budget_bytes) for name, run in runs.items()]


def search_on_ranks(name: str, run: RunConfig, budget_bytes: int) -> LongestSequence:
    """`search_steps` for one run; every rank of the process group calls alike."""
    world_size = dist.get_world_size()

    def measure(run: RunConfig) -> Tried:
        (memory,) = measure_steps(run, world_size, compute_in_float32=False)
        steady = memory.steady
        owners = _owners(steady.phase, steady.by_category, memory.host_bytes)
        return Tried(run.training.seq_len, largest(steady.live_bytes), owners)

    return _search(name, run, world_size, budget_bytes, measure)


def _search(
    name: str,
    run: RunConfig,
    world_size: int,
    limit_bytes: int,
    peak_of_run: Callable[[RunConfig], Tried],
    first: int = 0,
) -> LongestSequence:
    """Begins at a length of `first`, or at the run's own."""
    tries: list[Tried] = []

    def peak(seq_len: int) -> Tried:
        tries.append(peak_of_run(with_length(run, seq_len)))
        say(f"  {name}: {seq_len:,} tokens take {in_words(tries[-1].peak_bytes)}")
        return tries[-1]

    degrees = degrees_of(run, world_size)
    found = longest_of(peak, run, degrees, limit_bytes, first or run.training.seq_len)
    if found is None:
        return LongestSequence(name, 0, 0, "does not fit at any length")
    by_length = attrgetter("seq_len")
    shortest, last = min(tries, key=by_length), max(tries, key=by_length)
    slope = (last.peak_bytes - shortest.peak_bytes) / max(1, last.seq_len - shortest.seq_len)
    return LongestSequence(name, found.seq_len, found.peak_bytes, found.made_of, slope)


def _owners(place: str, by_category: Mapping[str, int], host_bytes: int) -> str:
    """Where the peak is and its largest owners, in words; and the host memory, if any."""
    owners = sorted(by_category.items(), key=lambda item: -item[1])[:_NUM_OWNERS]
    parts = ", ".join(f"{name} {in_words(size)}" for name, size in owners)
    host = f"; host memory {in_words(host_bytes)} a rank" if host_bytes else ""
    return f"{place}: {parts}{host}"


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
