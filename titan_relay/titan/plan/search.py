"""The longest sequence of each of several runs: searched over plans, or over real steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from titan_relay.config import RunConfig, degrees_of, with_length
from titan_relay.local_ranks import largest, on_ranks, say
from titan_relay.measure.devices import Device
from titan_relay.titan.plan.extrapolate import peak_of
from titan_relay.titan.plan.longest import Tried, longest_of
from titan_relay.titan.plan.measure import measure_steps
from titan_relay.titan.plan.plan import usable_bytes
from titan_relay.units import in_words

_NUM_OWNERS = 3


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

    def json(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        values = asdict(self)
        del values["bytes_per_token"]
        return values


def search_plans(
    runs: Mapping[str, RunConfig], world_size: int, device: Device
) -> list[LongestSequence]:
    """The longest sequence of each run, by name, on `device`, which has a limit."""
    limit_bytes = usable_bytes(device)
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
    shortest, last = min(tries, key=_length), max(tries, key=_length)
    slope = (last.peak_bytes - shortest.peak_bytes) / max(1, last.seq_len - shortest.seq_len)
    return LongestSequence(name, found.seq_len, found.peak_bytes, found.made_of, slope)


def _length(tried: Tried) -> int:
    return tried.seq_len


def _owners(place: str, by_category: Mapping[str, int], host_bytes: int) -> str:
    """Where the peak is and its largest owners, in words; and the host memory, if any."""
    owners = sorted(by_category.items(), key=lambda item: -item[1])[:_NUM_OWNERS]
    parts = ", ".join(f"{name} {in_words(size)}" for name, size in owners)
    host = f"; host memory {in_words(host_bytes)} a rank" if host_bytes else ""
    return f"{place}: {parts}{host}"
