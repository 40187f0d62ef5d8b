"""What ends a run from outside: signals to torchrun and to ranks, and the death of torchrun.

Each starts two real ranks, so that only one is in `make test`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.distributed import ROOT
from tests.titan.runs import config_file, write_data

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


class Launched:
    """torchrun with two ranks of a run that saves only if it is ended early."""

    def __init__(
        self, folder: Path, *arguments: str, steps: int = 100_000, before: str = ""
    ) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc_per_node=2", "-m", "titan_relay", "train"]
        command += ["--config", str(config_file(folder)), "--dump_folder", str(folder / "out")]
        command += f"--training.steps {steps} --lr_scheduler.total_steps 100000".split()
        command += ["--parallelism.expert_parallel_degree", "2", "--checkpoint.enable", *arguments]
        self.process = subprocess.Popen(
            ["bash", "-c", f'{before}exec "$@"', "bash", *command],
            cwd=ROOT,
            env=os.environ
            | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        self.output = ""

    def wait_for_step(self, step: int) -> None:
        """Read until that step is reported."""
        for line in self.lines:
            self.output += line
            if f"step: {step}/" in line:
                return
        raise AssertionError(self.output)

    def ranks(self) -> list[int]:
        """Process ids by rank."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sorted(map(int, children))

    def end(self) -> int:
        """The exit code; what is printed is in `output`."""
        self.output += self.lines.read()
        return self.process.wait(60)

    def losses(self) -> dict[int, tuple[str, str]]:
        """Loss and norm of the gradient of every step, as reported."""
        found = re.findall(r"step: (\d+)/\d+ .*?loss: (\S+) .*?grad_norm: (\S+)", self.output)
        return {int(step): (loss, norm) for step, loss, norm in found}


@contextmanager
def launched(
    folder: Path, *arguments: str, steps: int = 100_000, before: str = ""
) -> Iterator[Launched]:
    """A run that is not left behind."""
    run = Launched(folder, *arguments, steps=steps, before=before)
    try:
        yield run
    finally:
        run.process.kill()
        run.lines.close()
        run.process.wait()


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for_end(pids: list[int], timeout_s: float = 60.0) -> float:
    """Seconds until none of the processes is there."""
    began = time.monotonic()
    while any(map(is_alive, pids)) and time.monotonic() < began + timeout_s:
        time.sleep(0.01)
    return time.monotonic() - began


def last_words(run: Launched, reason: str) -> int:
    """The step after which the run says that it ended, and that this is saved."""
    found = re.findall(rf"ended after step (\d+) \({reason}\): .*step-\1 is saved", run.output)
    (step,) = set(found)  # torchrun repeats it
    return int(step)


def saved(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "out/checkpoint").glob("step-*"))


@linux
def test_a_signal_to_torchrun_saves_the_last_step_and_leaves_no_rank(tmp_path: Path) -> None:
    write_data(tmp_path)
    with launched(tmp_path) as run:
        run.wait_for_step(2)
        ranks = run.ranks()
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 1  # torchrun's
        step = last_words(run, "SIGTERM")
        assert wait_for_end(ranks) < 1.0
    assert saved(tmp_path) == [f"step-{step}"]
    assert max(run.losses()) == step


@linux
@pytest.mark.slow
def test_a_warning_to_one_rank_ends_all_and_the_run_goes_on_as_if_uninterrupted(
    tmp_path: Path,
) -> None:
    write_data(tmp_path)
    with launched(tmp_path) as run:
        run.wait_for_step(3)
        os.kill(run.ranks()[1], signal.SIGUSR1)
        assert run.end() == 1
        step = last_words(run, "SIGUSR1")
        assert "exitcode  : 75" in run.output
    with launched(tmp_path, steps=step + 3) as again:
        assert again.end() == 0
    whole_folder = tmp_path / "whole"
    whole_folder.mkdir()
    write_data(whole_folder)
    with launched(whole_folder, steps=step + 3) as whole:
        assert whole.end() == 0
    assert run.losses() | again.losses() == whole.losses()


@linux
@pytest.mark.slow
def test_a_warning_that_torchrun_is_made_to_ignore_ends_the_run(tmp_path: Path) -> None:
    """As a batch system sends it, to every process of a job's step."""
    write_data(tmp_path)
    with launched(tmp_path, "--checkpoint.async_mode", "async", before="trap '' USR1; ") as run:
        run.wait_for_step(2)
        for pid in (run.process.pid, *run.ranks()):
            os.kill(pid, signal.SIGUSR1)
        run.end()
        assert saved(tmp_path) == [f"step-{last_words(run, 'SIGUSR1')}"]


@linux
@pytest.mark.slow
def test_ranks_whose_launcher_was_killed_end_and_write_nothing_more(tmp_path: Path) -> None:
    write_data(tmp_path)
    with launched(tmp_path, "--checkpoint.interval", "1") as run:
        run.wait_for_step(2)
        ranks = run.ranks()
        run.process.kill()
        assert wait_for_end(ranks) < 2.0
        left = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        time.sleep(1.0)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == left
    with launched(tmp_path, steps=4) as again:
        assert again.end() == 0


@linux
@pytest.mark.slow
def test_a_time_limit_ends_the_run(tmp_path: Path) -> None:
    write_data(tmp_path)
    with launched(tmp_path, "--training.max_minutes", "0.1") as run:
        run.end()
        assert saved(tmp_path) == [f"step-{last_words(run, 'training.max_minutes')}"]
