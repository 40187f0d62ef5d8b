"""A plan made by another process, at the lowest priority, while this one trains.

A dry run needs a process without a process group and without an accelerator; a run that trains has
both. So it is made elsewhere: `python -m titan_relay.titan.plan.background` reads a request from
its standard input and writes the plan to its standard output.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass

from titan_relay.config import RunConfig
from titan_relay.measure.devices import Device

_LOWEST_PRIORITY = 19
_ERROR_LENGTH = 300


@dataclass(frozen=True)
class Request:
    """What to plan. `changes`: also look for what would make it fit, if it does not."""

    run: RunConfig
    world_size: int
    rank: int
    device: Device
    worst: bool = True
    changes: bool = False


@dataclass(frozen=True)
class Planned:
    """A plan in words, with the peaks of a process's first step: of a run that begins, and of one
    that has an optimizer's state already."""

    lines: list[str]
    first_bytes: int
    steady_bytes: int
    fits: bool | None = None


class PlanError(RuntimeError):
    """The other process did not make a plan; one line."""


class BackgroundPlan:
    """A plan under way; `close` it, finished or not."""

    def __init__(self, request: Request, *, low_priority: bool = True) -> None:
        command = [sys.executable, "-m", "titan_relay.titan.plan.background"]
        if low_priority:
            command.append("--low-priority")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        self._output: tuple[bytes, bytes] | None = None
        # Reads both pipes to their ends, so that neither can fill up and stop the process.
        self._reader = threading.Thread(
            target=self._communicate, args=(pickle.dumps(request),), daemon=True
        )
        self._reader.start()

    def poll(self) -> Planned | None:
        """The plan if it is ready. Raises `PlanError` if there will be none."""
        if self._reader.is_alive() or self._output is None:
            return None
        return self._read(*self._output)

    def wait(self) -> Planned:
        """The plan, once it is ready. Raises `PlanError`."""
        self._reader.join()
        assert self._output is not None
        return self._read(*self._output)

    def close(self) -> None:
        """Stop the process if it still runs."""
        self._process.kill()
        self._reader.join()

    def _communicate(self, request: bytes) -> None:
        self._output = self._process.communicate(request)

    def _read(self, output: bytes, errors: bytes) -> Planned:
        if self._process.returncode != 0:
            last_line = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise PlanError("".join(last_line)[:_ERROR_LENGTH] or "it was ended")
        planned: Planned = pickle.loads(output)
        return planned


def _main() -> None:
    if "--low-priority" in sys.argv:
        os.nice(_LOWEST_PRIORITY)
    request: Request = pickle.load(sys.stdin.buffer)
    # Nothing that is printed on the way may get between the bytes of the answer.
    answer, sys.stdout = sys.stdout.buffer, sys.stderr
    from titan_relay.titan.plan.changes import nearest_changes
    from titan_relay.titan.plan.plan import plan_run
    from titan_relay.titan.plan.report import plan_lines

    about = (request.run, request.world_size, request.device)
    plan = plan_run(*about, rank=request.rank, worst=request.worst)
    changes = []
    if request.changes and plan.fits is False:
        changes = nearest_changes(*about, plan.peak_bytes, rank=request.rank)
    start = plan.start  # what this process's first step is like
    # By its public name, not as a class of `__main__`, which is another module for the reader.
    from titan_relay.titan.plan import background

    planned = background.Planned(
        plan_lines(plan, changes), start.first.live_bytes, start.steady.live_bytes, plan.fits
    )
    pickle.dump(planned, answer)
    answer.flush()


if __name__ == "__main__":
    _main()
