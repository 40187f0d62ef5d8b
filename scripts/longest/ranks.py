"""The CPU ranks that scripts start with `torch.multiprocessing.spawn`."""

import os

import torch
import torch.distributed as dist
from child_process import end_with_parent


def start_rank(rank: int, world_size: int, folder: str) -> None:
    """One thread, and a gloo group over all ranks."""
    end_with_parent()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )


def largest(num_bytes: int) -> int:
    """The most that any rank has; on all ranks."""
    highest = torch.tensor(num_bytes)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return int(highest.item())
