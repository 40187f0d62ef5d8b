"""Ends that a signal or a time limit asks of some rank: all ranks end at the same step, saved."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.distributed import forkserver, run_ranks
from tests.titan.runs import a_run, config_file, layout, trainer_of, write_data
from titan_relay.titan.train.early_end import EarlyEnd, reasons

ASKED_AT, STEPS = 3, 5
SAVED = {"checkpoint__enable": True, "checkpoint__interval": 100}
RUNS: dict[str, dict[str, Any]] = {
    "fsdp": layout(dp=2, ep=2) | SAVED,
    "saving by a thread": layout(dp=2, ep=2) | SAVED | {"checkpoint__async_mode": "async"},
    "tensor parallel": layout(tp=2, ep=1) | SAVED | {"relay__dispatcher": "alltoall"},
    "pipeline": layout(pp=2) | SAVED,
    "nothing reported": layout(dp=2, ep=2) | SAVED | {"metrics__log_freq": 100},
    "nothing saved": layout(dp=2, ep=2),
    "only loading": layout(dp=2, ep=2) | SAVED | {"checkpoint__load_only": True},
}


# Whose run to the end is another's too.
LIKE = dict.fromkeys(
    ("saving by a thread", "nothing reported", "nothing saved", "only loading"), "fsdp"
)
RESUMED = ("fsdp", "saving by a thread", "tensor parallel", "pipeline", "nothing reported")


class Asking(EarlyEnd):
    """As if a signal came to rank 1, and to nobody else, in step `ASKED_AT`."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.trainer = trainer

    def requests(self) -> tuple[bool, ...]:
        return (self.trainer.step == ASKED_AT and dist.get_rank() == 1, False, False)


@dataclass(frozen=True)
class Outcome:
    """What is left of a run: what it reported, and its weights."""

    losses: list[float]
    weights: list[torch.Tensor]
    ended_early: bool


def outcome_of(trainer: Any) -> Outcome:
    """Train to the end, whoever asked for it."""
    trainer.train()
    trainer.close()
    weights = [each for part in trainer.model_parts for each in part.parameters()]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in weights]
    return Outcome(trainer.losses, local, trainer.ended_early)


def ended_and_resumed(path: Path, name: str, whole: Outcome) -> dict[str, Any]:
    """A run that is asked to end, and the same one started again, beside one that is not asked."""
    settings = RUNS[name] | {"training__steps": STEPS}
    trainer = trainer_of(path, a_run(name, **settings))
    trainer.early_end = Asking(trainer)
    asked = outcome_of(trainer)
    result = {
        "step": trainer.step,
        "ended_early": asked.ended_early,
        "reasons": reasons(trainer.balance.asked),
        "saved": sorted(each.name for each in (path / name).glob("checkpoint/step-*")),
    }
    if name in RESUMED:
        again = outcome_of(trainer_of(path, a_run(name, **settings)))
        result["again ended early"] = again.ended_early
        result["same losses"] = asked.losses + again.losses == whole.losses
        result["same weights"] = all(map(torch.equal, again.weights, whole.weights))
    return result


def at_the_last_step(path: Path) -> dict[str, Any]:
    """A run that is asked in its last step has ended as it would have."""
    trainer = trainer_of(
        path, a_run("last", **RUNS["fsdp"] | {"training__steps": ASKED_AT, **SAVED})
    )
    trainer.early_end = Asking(trainer)
    trainer.train()
    trainer.close()
    return {"step": trainer.step, "ended_early": trainer.ended_early}


def time_limit(path: Path) -> dict[str, Any]:
    """A minute of a clock that tells 25 s more at every look, on rank 0; none elsewhere."""
    looks = iter(range(0, 1000, 25))
    trainer = trainer_of(path, a_run("limit", **layout(dp=2, ep=2)))
    if dist.get_rank() == 0:
        trainer.early_end = EarlyEnd(1.0, clock=lambda: next(looks))
    trainer.train()
    trainer.close()
    return {"step": trainer.step, "reasons": reasons(trainer.balance.asked)}


def scenario(folder: str) -> dict[str, Any]:
    """All runs of this file inside one group of ranks."""
    torch.set_num_threads(1)
    path = Path(folder)
    wholes = {
        name: outcome_of(
            trainer_of(path, a_run(f"{name} whole", **RUNS[name] | {"training__steps": STEPS}))
        )
        for name in RUNS
        if name not in LIKE
    }
    return {
        **{name: ended_and_resumed(path, name, wholes[LIKE.get(name, name)]) for name in RUNS},
        "last": at_the_last_step(path),
        "limit": time_limit(path),
    }


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("early")
    write_data(folder)
    config_file(folder)
    return run_ranks(scenario, 2, str(folder), timeout_s=400.0)


@pytest.mark.parametrize("name", RUNS)
def test_a_signal_to_one_rank_ends_all_at_the_same_step(
    name: str, by_rank: list[dict[str, Any]]
) -> None:
    for rank in by_rank:
        assert rank[name]["step"] == ASKED_AT
        assert rank[name]["ended_early"]
        assert rank[name]["reasons"] == "SIGTERM"
        assert rank[name]["saved"] == ([f"step-{ASKED_AT}"] if name in RESUMED else [])


@pytest.mark.parametrize("name", RESUMED)
def test_it_goes_on_as_if_it_had_not_been_ended(name: str, by_rank: list[dict[str, Any]]) -> None:
    for rank in by_rank:
        assert not rank[name]["again ended early"]
        assert rank[name]["same weights"]
        assert rank[name]["same losses"] or name == "nothing reported"


def test_a_signal_in_the_last_step_changes_nothing(by_rank: list[dict[str, Any]]) -> None:
    assert by_rank[0]["last"] == {"step": ASKED_AT, "ended_early": False}


def test_the_time_limit_of_rank_0_ends_all_at_the_same_step(by_rank: list[dict[str, Any]]) -> None:
    for rank in by_rank:
        assert rank["limit"] == {"step": 3, "reasons": "training.max_minutes"}


def noted(listener: EarlyEnd, *expected: bool) -> bool:
    """Whether the signals are noted within a second."""
    deadline = time.monotonic() + 1.0
    while listener.requests() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return listener.requests() == expected


def test_signals_are_noted_and_afterwards_are_as_they_were() -> None:
    usual = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    early_end, num_threads = EarlyEnd(), threading.active_count()
    early_end.is_training = True
    with early_end.listening():
        assert early_end.requests() == (False, False, False)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert noted(early_end, False, True, False)
        os.kill(os.getpid(), signal.SIGUSR1)  # the same wish, passed on by somebody else
        os.kill(os.getpid(), signal.SIGTERM)
        assert noted(early_end, True, True, False)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == usual
    assert threading.active_count() == num_threads
    assert reasons(early_end.requests()) == "SIGTERM and SIGUSR1"


def test_a_forked_child_ends_by_its_own_signals_which_this_process_does_not_see() -> None:
    early_end = EarlyEnd()
    early_end.is_training = True
    with early_end.listening():
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not noted(early_end, True, False, False)


def stuck(phase: str, ready: Any) -> None:
    """A process in native code that no signal interrupts, as of a collective."""
    early_end = EarlyEnd()
    early_end.is_training = phase != "starting"
    early_end.is_over = phase == "over"
    with early_end.listening():
        native, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        native.sem_init(semaphore, 0, 0)
        threading.Timer(6.0, os._exit, [9]).start()
        ready.set()
        native.sem_wait(semaphore)


CASES = {
    "at the start": ("starting", (1.0,), 128 + signal.SIGTERM),
    "asked twice": ("training", (1.0, 3.0), 128 + signal.SIGTERM),
    "asked once, by two who pass it on": ("training", (1.0, 1.1), 9),
    "all is saved": ("over", (1.0, 3.0), 9),
}


@pytest.fixture(scope="module")
def exit_codes() -> dict[str, int | None]:
    """Of a stuck process in each case; all at the same time."""
    codes: dict[str, int | None] = {}

    def run(name: str) -> None:
        phase, at_seconds, _ = CASES[name]
        ready = forkserver().Event()
        process = forkserver().Process(target=stuck, args=(phase, ready), daemon=True)
        process.start()
        ready.wait(120)
        began = time.monotonic()
        for at in at_seconds:
            time.sleep(max(0.0, began + at - time.monotonic()))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        codes[name] = process.exitcode

    threads = [threading.Thread(target=run, args=(name,)) for name in CASES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes


@pytest.mark.parametrize("name", CASES)
def test_a_process_that_is_stuck_ends_by_the_second_signal_and_at_the_start_by_the_first(
    name: str, exit_codes: dict[str, int | None]
) -> None:
    assert exit_codes[name] == CASES[name][2]
