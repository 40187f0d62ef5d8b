"""Which changes are proposed to a run that does not fit, for made-up peaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.titan.runs import a_run, config_file, layout, load_run
from titan_relay.config import RunConfig
from titan_relay.measure.devices import Device
from titan_relay.titan.plan import changes
from titan_relay.titan.plan.extrapolate import Moment

LIMIT = 1000  # bytes, of which live tensors may have 920
Peak = Callable[[RunConfig], int]


@pytest.fixture
def propose(tmp_path: Path) -> Callable[..., list[changes.Change]]:
    """What `nearest_changes` says to a run of 4 ranks whose peak is a function of its keys."""
    keys: dict[str, Any] = {
        "training__local_batch_size": 4,
        "training__global_batch_size": -1,
        "training__seq_len": 64,
    }
    run = load_run(config_file(tmp_path).parent, a_run("", **layout(dp=4, ep=2) | keys))

    def proposed(peak: Peak, **asked: Any) -> list[changes.Change]:
        def peak_of(candidate: RunConfig, world_size: int, device: Device, **given: Any) -> Moment:
            assert given == {"rank": 0, "skew": 1.0} | asked
            return Moment("somewhere", {"everything": peak(candidate)}, 0)

        small = Device("small", LIMIT)
        return changes.nearest_changes(run, 4, small, peak(run), peak_of=peak_of, **asked)

    return proposed


def _by_batch(run: RunConfig) -> int:
    return 500 * run.training.local_batch_size


def test_only_changes_that_help_are_named(propose: Callable[..., list[changes.Change]]) -> None:
    batch = {"training.local_batch_size": 2, "training.global_batch_size": 16}
    more = {"training.local_batch_size": 1, "training.global_batch_size": 16}
    first, combined = propose(_by_batch)
    assert (first.settings, first.peak_bytes, first.fits) == (batch, 1000, False)
    assert (combined.settings, combined.peak_bytes, combined.fits) == (more, 500, True)


def test_a_change_that_fits_needs_no_company(propose: Callable[..., list[changes.Change]]) -> None:
    (change,) = propose(lambda run: 450 * run.training.local_batch_size)
    assert change.fits


def test_less_than_a_hundredth_is_no_help(propose: Callable[..., list[changes.Change]]) -> None:
    assert propose(lambda run: 2000 + run.training.local_batch_size) == []


def test_a_shorter_sequence_comes_last(propose: Callable[..., list[changes.Change]]) -> None:
    def peak(run: RunConfig) -> int:
        return 30 * run.training.seq_len + 50 * run.training.local_batch_size

    batch, shorter, combined = propose(peak)
    assert batch.settings == {"training.local_batch_size": 2, "training.global_batch_size": 16}
    assert shorter.settings == {"training.seq_len": 32}
    assert shorter.peak_bytes < batch.peak_bytes
    assert combined.fits
    assert combined.settings == batch.settings | {
        "training.local_batch_size": 1,
        "training.seq_len": 16,
    }


def test_routing_and_rank_are_those_of_the_plan(
    propose: Callable[..., list[changes.Change]],
) -> None:
    assert propose(_by_batch, rank=3, skew=1.5)


def test_settings_are_what_the_command_line_takes() -> None:
    levels = {"attention_retention.layers": ("output", "recompute")}
    line = changes.Change(levels, 2**20, fits=True).line()
    assert line == "--attention_retention.layers output,recompute: peak 1.00 MiB, fits"
