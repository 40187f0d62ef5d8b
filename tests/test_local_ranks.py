"""Ranks that a command starts: rank 0's answer, one failure for all, and no rank left behind."""

import atexit
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from tests.support.distributed import ROOT, gloo_threads
from titan_relay.local_ranks import largest, on_ranks
from titan_relay.moe import Ring, relay_ring


def sizes(offset: int) -> tuple[int, str]:
    """The largest of what the ranks have, and more than a pipe holds."""
    return largest(offset + dist.get_rank()), "x" * 2**20


def fail_on_the_second_rank() -> None:
    if dist.get_rank() == 1:
        raise KeyError("broken")
    time.sleep(600)


def test_the_first_rank_answers() -> None:
    assert on_ranks(sizes, 5, world_size=2) == (6, "x" * 2**20)


def test_a_rank_that_fails_ends_the_others() -> None:
    with pytest.raises(ProcessRaisedException, match="KeyError: 'broken'"):
        on_ranks(fail_on_the_second_rank, world_size=2)


def keep_what_can_be_kept(left: Path) -> int:
    """A group in a circle, its ring until the end, and what an optimizer's first step imports."""
    circle: list[Any] = [dist.group.WORLD]
    circle.append(circle)
    importlib.import_module("torch.distributed.nn.functional")
    atexit.register(_tell, left / str(dist.get_rank()), relay_ring(circle[0]))
    return gloo_threads()


def _tell(path: Path, ring: Ring) -> None:
    path.write_text(f"{gloo_threads()} beside a ring of {ring.link.size}")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for threads")
def test_no_thread_of_a_group_outlives_its_rank(tmp_path: Path) -> None:
    assert on_ranks(keep_what_can_be_kept, tmp_path, world_size=2) > 0
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == dict.fromkeys(("0", "1"), "0 beside a ring of 2")


# A rank that waits for another, started as a shell's background job is, which ignores SIGINT.
PROGRAM = """
import sys, time
from pathlib import Path
from titan_relay.local_ranks import on_ranks

def wait(begun):
    Path(begun).touch()
    time.sleep(600)

if __name__ == "__main__":
    on_ranks(wait, sys.argv[1], world_size=1)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for child processes")
def test_ranks_end_with_their_command(tmp_path: Path) -> None:
    program, begun = tmp_path / "program.py", tmp_path / "begun"
    program.write_text(PROGRAM)
    arguments = [sys.executable, str(program), str(begun)]
    parent = subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
    )
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    _wait_until(begun.exists)
    ranks = [Path(f"/proc/{pid}") for pid in children.read_text().split()]
    parent.kill()
    parent.wait()
    _wait_until(lambda: not any(_runs(rank) for rank in ranks))


def _runs(process: Path) -> bool:
    """Whether it does, and not just waits to be noticed by the process that inherited it."""
    try:
        return ") Z" not in (process / "stat").read_text()
    except FileNotFoundError:
        return False


def _wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
