"""Ranks that a command starts on this machine, and that end with it. Needs torch only."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from titan_relay.private_torch import end_process_groups


def on_ranks(
    work: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    device: str = "cpu",
    num_threads: int = 1,
) -> Any:
    """What `work(*arguments)` returns on rank 0 of a process group of new processes, all of which
    call it.

    Args:
        work: of a module's top level, as the arguments and the answer are pickled.
        device: "cuda" gives each rank a GPU of its own and NCCL, "cpu" gloo.
        num_threads: of each rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed, with its traceback; the others
            were ended.
    """
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        about = (world_size, folder, device, num_threads)
        mp.spawn(_rank_main, args=(about, work, arguments), nprocs=world_size)
        return pickle.loads(Path(folder, "answer").read_bytes())


def _rank_main(
    rank: int,
    about: tuple[int, str, str, int],
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    world_size, folder, device, num_threads = about
    end_with_parent()
    torch.set_num_threads(num_threads)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
    )
    answer = work(*arguments)
    if rank == 0:
        Path(folder, "answer").write_bytes(pickle.dumps(answer))
    dist.barrier()
    end_process_groups()


def end_with_parent() -> None:
    """Let this process end when the one that started it does, however that ended.

    Otherwise a rank that waits for others, or a worker that waits for work, lives on when its
    command is killed.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "not started by multiprocessing"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def largest(num_bytes: int) -> int:
    """The most that any rank has; on all ranks."""
    highest = torch.tensor(num_bytes)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return int(highest.item())


def say(text: str) -> None:
    """Print a line of progress on standard error; of ranks, the first speaks for all."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
