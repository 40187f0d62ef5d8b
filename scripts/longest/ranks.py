"""The CPU ranks that scripts start with `torch.multiprocessing.spawn`."""

import os
import signal

import torch
import torch.distributed as dist


def start_rank(rank: int, world_size: int, folder: str) -> None:
    """One thread, and a gloo group over all ranks."""
    end_at_interrupt()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )


def end_at_interrupt() -> None:
    """Let SIGINT, which torch sends to a rank whose parent was killed, end the rank at once.

    Otherwise a rank that waits for others, or that a shell's background job started, lives on.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def largest(num_bytes: int) -> int:
    """The most that any rank has; on all ranks."""
    highest = torch.tensor(num_bytes)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return int(highest.item())
