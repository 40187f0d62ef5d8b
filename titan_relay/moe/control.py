"""The host-side channel of a ring: a few numbers per call that every rank shows to every other."""

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout


class Control(Protocol):
    """All-gather of equally many integers from each rank, without touching a device."""

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Everybody's ``numbers`` by rank. Raises RuntimeError if a rank does not come."""
        ...


class ProcessGroupControl:
    """Over a gloo group of its own, so that it never waits for a device or mixes with messages."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait this long for the other ranks from now on."""
        _set_pg_timeout(timeout, self._group)

    def gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        every = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(every, mine, group=self._group)
        return [row.tolist() for row in every]


class NoControl:
    """Of a group with the fake backend, whose other ranks do not exist."""

    def gather(self, numbers: list[int]) -> list[list[int]]:
        raise RuntimeError("the group has the fake backend; run the layer on fake tensors")
