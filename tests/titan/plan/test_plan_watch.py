"""The plan of a run that is under way: its report, its comparison, and its failures."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.cli import run_cli
from tests.titan.runs import config_file
from titan_relay.config import RunConfig, load_config
from titan_relay.measure.devices import device_named
from titan_relay.titan.plan import background
from titan_relay.titan.plan.background import BackgroundPlan, PlanError, Planned, Request
from titan_relay.titan.plan.watch import PlanWatch

MIB = 2**20


class Ready:
    """A plan that is there after being asked for once."""

    def __init__(self) -> None:
        self.polls = 0
        self.closed = False

    def poll(self) -> Planned | None:
        self.polls += 1
        lines = ["a line"]
        return (
            Planned(lines, first_bytes=100 * MIB, steady_bytes=200 * MIB)
            if self.polls > 1
            else None
        )

    def close(self) -> None:
        self.closed = True


class Metrics:
    """Takes notes; measured what it is told."""

    def __init__(self, live_peak_bytes: int) -> None:
        self.live_peak_bytes = live_peak_bytes
        self.notes: list[str] = []

    def note(self, tag: str, text: str, step: int) -> None:
        self.notes.append(f"{tag} at {step}: {text}")


def watch_of(plan: Ready, metrics: Metrics) -> PlanWatch:
    return PlanWatch(plan, metrics, alltoall=False)  # type: ignore[arg-type]


def run_of(tmp_path: Path) -> RunConfig:
    return load_config(["--config", str(config_file(tmp_path))]).config


@pytest.mark.parametrize(
    ("measured", "has_state", "expected", "warns"),
    [
        (96 * MIB, False, "predicted 100.0 MiB, measured 96.0 MiB, -4.0%", False),
        (110 * MIB, False, "predicted 100.0 MiB, measured 110.0 MiB, +10.0%", True),
        (199 * MIB, True, "predicted 200.0 MiB, measured 199.0 MiB, -0.5%", False),
    ],
)
def test_the_first_step_is_held_against_its_plan(
    caplog: pytest.LogCaptureFixture,
    measured: int,
    has_state: bool,
    expected: str,
    warns: bool,
) -> None:
    metrics = Metrics(measured)
    plan = watch_of(Ready(), metrics)
    with caplog.at_level(logging.INFO):
        for step in (1, 2, 3):
            plan.before_step(has_optimizer_state=has_state or step > 1)
            plan.after_step(step)
            metrics.live_peak_bytes = 7 * MIB  # later steps are not what is compared
    assert len(metrics.notes) == 1
    assert metrics.notes[0].startswith("plan at 2:")
    assert expected in metrics.notes[0]
    assert warns == any(record.levelno == logging.WARNING for record in caplog.records)


def test_a_plan_that_fails_is_one_warning_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Ready):
        def poll(self) -> Planned | None:
            raise PlanError("no such thing")

    metrics = Metrics(1)
    plan = watch_of(Failing(), metrics)
    with caplog.at_level(logging.WARNING):
        plan.after_step(1)
        plan.after_step(2)
    assert [record.message for record in caplog.records] == [
        "There is no plan of this run: no such thing"
    ]
    assert metrics.notes == []


def test_a_run_that_ends_before_its_plan_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Ready):
        def poll(self) -> Planned | None:
            return None

    plan = watch_of(Slow(), Metrics(1))
    with caplog.at_level(logging.INFO):
        plan.after_step(1)
        plan.close()
        plan.close()
    assert [record.message for record in caplog.records] == [
        "The run ended before its plan was ready; --plan makes one by itself."
    ]


def test_the_other_process_answers_or_says_why_not(tmp_path: Path) -> None:
    request = Request(run_of(tmp_path), 1, 0, device_named("cpu"))
    good = BackgroundPlan(request)
    bad = BackgroundPlan(Request(request.run, 1, 5, request.device))  # there is no rank 5
    ended = BackgroundPlan(request)
    ended.close()
    with pytest.raises(PlanError, match="ended"):
        ended.poll()
    assert isinstance(good.wait(), background.Planned)
    with pytest.raises(PlanError) as raised:
        bad.wait()
    assert "\n" not in str(raised.value)


def test_plan_prints_and_does_not_train(tmp_path: Path) -> None:
    path = config_file(tmp_path)  # its data and tokenizer do not exist
    done = run_cli("--config", str(path), "--plan", "--training.local_batch_size", "8")
    assert done.returncode == 0, done.stderr
    assert "live at the peak" in done.stdout
    assert "step:" not in done.stdout + done.stderr
