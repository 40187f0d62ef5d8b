"""The one helper that spawns ranks for every distributed test.

``run_ranks(function, world_size, *args)`` runs ``function(*args)`` in ``world_size`` processes with
``torch.distributed`` initialised (gloo on CPU by default, the same test on NCCL with
``backend="nccl"``), and returns their results by rank. Rendezvous is a file, so no port can clash;
a rank that fails ends the others and its traceback is shown; ranks that do not end within
``timeout_s`` are ended and named. Starting ranks is not free: test many configurations inside one
call: ``run_jobs`` gives results by name, for a test each, and ``subgroup`` gives smaller groups.
"""

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 5.0  # for the other ranks to report, once one has failed
# Imported once, in the server that ranks are forked from. What is not installed is skipped there.
_PRELOADED = ["torch.distributed", "titan_relay.moe", "titan_relay.titan.run", "tests.titan.runs"]


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not end; the message holds every report."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 240.0,
) -> list[Any]:
    """Run ``function(*args)`` on every rank; results by rank.

    Args:
        function: a module-level function (it is sent by name), as are its arguments' classes.
        timeout_s: for everything together, and the process group's own timeout.
    """
    context = forkserver()
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        processes: list[BaseProcess] = []
        connections: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            job = (theirs, rank, world_size, rendezvous, backend, timeout_s, function, args)
            process = context.Process(target=_rank_main, args=job, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        try:
            reports = _collect(connections, timeout_s)
        finally:
            _end(processes)
    failures = [
        f"--- rank {rank} ---\n{report[1]}"
        for rank, report in enumerate(reports)
        if report[0] != "ok"
    ]
    if failures:
        raise RanksFailed("\n".join(failures))
    return [report[1] for report in reports]


@dataclass(frozen=True)
class Job:
    """``function(group, *args)`` on each of the group of the first ``num_ranks`` ranks."""

    num_ranks: int
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


def run_jobs(jobs: Mapping[str, Job], world_size: int) -> dict[str, list[Any]]:
    """Run jobs one after the other in one group of ranks; by name their results by rank.

    What is wrong in one of them should be a result, so that a test for each can look at its own; an
    exception ends all.
    """
    by_rank = run_ranks(_do_jobs, world_size, jobs)
    return {name: [results[name] for results in by_rank if name in results] for name in jobs}


def _do_jobs(jobs: Mapping[str, Job]) -> dict[str, Any]:
    sizes = sorted({job.num_ranks for job in jobs.values()})
    groups = {size: subgroup(range(size)) for size in sizes}
    return {
        name: job.function(groups[job.num_ranks], *job.args)
        for name, job in jobs.items()
        if groups[job.num_ranks] is not None
    }


def forkserver() -> ForkServerContext:
    """Starts processes by forking a server that has imported torch and torchtitan."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def subgroup(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group of some ranks, made by all of them; None on a rank that is not in it."""
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


def gloo_threads() -> int:
    """How many threads this process's gloo groups have; Linux tells, elsewhere none is seen."""
    num_threads = 0
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            num_threads += (task / "comm").read_text() == "pt_gloo_runloop\n"
    return num_threads


def _rank_main(
    report: Connection,
    rank: int,
    world_size: int,
    rendezvous: str,
    backend: str,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1"
    )
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(*args)
        # A rank that is done must not tear its connections down under one that is not.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        report.send(("failed", traceback.format_exc()))
    else:
        report.send(("ok", result))
    finally:
        report.close()
        # Leave without waiting for a backend's threads, which may be stuck on a dead neighbour.
        os._exit(0)


def _collect(connections: list[Connection], timeout_s: float) -> list[tuple[str, Any]]:
    reports: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    open_ranks = {id(connection): rank for rank, connection in enumerate(connections)}
    pending = list(connections)
    while pending:
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = open_ranks[id(connection)]
            try:
                reports[rank] = connection.recv()
            except EOFError:
                reports[rank] = ("died", "the process ended without a report (killed or aborted)")
            pending.remove(connection)
            if reports[rank][0] != "ok":
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    missing = ("missing", f"no report within {timeout_s} s, or ended after another rank failed")
    return [reports.get(rank, missing) for rank in range(len(connections))]


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(timeout=0.5)
        if process.is_alive():
            process.kill()
            process.join()
