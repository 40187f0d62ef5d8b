"""Host memory that stands in for device memory: buffers under a budget, and how trackers tell.

On a machine without a device both are the same memory, so bytes say themselves which they are:
what is allocated inside `host_allocation` is host memory to `LiveBytes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_allocates_on_host: ContextVar[bool] = ContextVar("titan_relay_host_allocation", default=False)


@contextmanager
def host_allocation() -> Iterator[None]:
    """Tensors made inside are host memory, whatever the device."""
    token = _allocates_on_host.set(True)
    try:
        yield
    finally:
        _allocates_on_host.reset(token)


def allocates_on_host() -> bool:
    """Whether a tensor made now is host memory."""
    return _allocates_on_host.get()


class HostBuffers:
    """Flat byte buffers in host memory, pinned beside a CUDA device, reused by size.

    Args:
        budget_bytes: never are more bytes allocated.
        pinned: lock the pages, so that a device copies without waiting for the host.
    """

    def __init__(self, budget_bytes: int, *, pinned: bool) -> None:
        self.budget_bytes = budget_bytes
        self.allocated_bytes = 0
        self._pinned = pinned
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """A buffer of that size, or None if the budget has no room for it."""
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        if self.allocated_bytes + num_bytes > self.budget_bytes:
            return None
        self.allocated_bytes += num_bytes
        with host_allocation():
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let the buffer be used again; nothing may still read or write it."""
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def shrink(self, num_bytes: int) -> int:
        """Free as many unused buffers as make at most `num_bytes`, and none are allocated again.

        Returns their bytes.
        """
        freed_bytes = 0
        for size, buffers in self._free.items():
            while buffers and freed_bytes + size <= num_bytes:
                buffers.pop()
                freed_bytes += size
        self.allocated_bytes -= freed_bytes
        self.budget_bytes = self.allocated_bytes
        return freed_bytes
