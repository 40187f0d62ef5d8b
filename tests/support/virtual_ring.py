"""A ring of virtual ranks in one process: threads, simulated links, and a virtual clock.

Two uses. With ``latency_s`` and ``bytes_per_s`` the links take exactly the time that they should on
a clock of each rank that only links and ``advance`` move, so that overlap can be computed rather
than measured. With ``hostile=True`` a link delivers as late as it may and spoils every buffer the
moment its owner gives it up: a receive buffer when it is queued, a sent buffer when the wait for it
is over; and it notices a buffer changed while it was being sent.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from titan_relay.moe.ring import Ring

_PATIENCE_S = 60.0
_POLL_S = 0.02


class _Abandoned(Exception):
    """Another rank has failed, so that what this one waits for will not come."""


@dataclass
class _Message:
    tensors: Sequence[torch.Tensor]
    snapshots: list[torch.Tensor]
    arrival_s: float
    taken: threading.Event = field(default_factory=threading.Event)


class VirtualWorld:
    """``size`` virtual ranks; ``run`` calls a function on each in a thread of its own."""

    def __init__(
        self,
        size: int,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float = math.inf,
        hostile: bool = False,
    ) -> None:
        self.size = size
        self.latency_s, self.bytes_per_s, self.hostile = latency_s, bytes_per_s, hostile
        self.clock_s = [0.0] * size
        self.sent_bytes = [0] * size
        self.link_free_s = [0.0] * size
        self.channels: list[queue.Queue[_Message]] = [queue.Queue() for _ in range(size)]
        self.protected: set[int] = set()
        self.numbers: list[list[int]] = [[] for _ in range(size)]
        self.barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self.failed = threading.Event()
        self._local = threading.local()

    def protect(self, tensors: Iterable[torch.Tensor]) -> None:
        """The caller's own tensors are never spoilt."""
        self.protected |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def advance(self, seconds: float) -> None:
        """This thread's rank computes for ``seconds`` of its clock."""
        self.clock_s[self._local.rank] += seconds

    def wait_for(self, poll: Callable[[], Any]) -> Any:
        """Call ``poll`` (which waits a little) until it gives something true."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s:
            value = poll()
            if value:
                return value
            if self.failed.is_set():
                raise _Abandoned
        raise TimeoutError("a virtual rank waited in vain")

    def take(self, channel: int) -> _Message:
        """The next message on a channel."""

        def poll() -> _Message | None:
            try:
                return self.channels[channel].get(timeout=_POLL_S)
            except queue.Empty:
                return None

        return self.wait_for(poll)

    def run(self, function: Callable[[int, Ring | None], Any]) -> list[Any]:
        """``function(rank, ring)`` on every rank; the first rank's failure is raised."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size

        def main(rank: int) -> None:
            self._local.rank = rank
            ring = None
            if self.size > 1:
                ring = Ring(_VirtualLink(self, rank), _VirtualControl(self, rank))
            try:
                results[rank] = function(rank, ring)
            except BaseException as error:
                errors[rank] = error
                self.failed.set()
                self.barrier.abort()

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [error for error in errors if error is not None]
        # A rank that waited for the failed one has nothing of its own to tell.
        found.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError | _Abandoned))
        if found:
            raise found[0]
        return results


class _VirtualLink:
    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def start(
        self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> "_VirtualTransfers":
        world, rank = self.world, self.rank
        num_bytes = sum(tensor.nbytes for tensor in sends)
        world.sent_bytes[rank] += num_bytes
        begin_s = max(world.clock_s[rank], world.link_free_s[rank])
        world.link_free_s[rank] = begin_s + num_bytes / world.bytes_per_s
        snapshots = [tensor.clone() for tensor in sends] if world.hostile else []
        arrival_s = world.link_free_s[rank] + world.latency_s
        message = _Message(list(sends), snapshots, arrival_s)
        if world.hostile:
            _spoil(receives)
        world.channels[rank].put(message)
        return _VirtualTransfers(world, rank, message, list(receives))


@dataclass
class _VirtualTransfers:
    world: VirtualWorld
    rank: int
    sent: _Message
    receives: list[torch.Tensor]

    def wait(self) -> None:
        world, rank = self.world, self.rank
        incoming = world.take((rank - 1) % world.size)
        for tensor, snapshot in zip(incoming.tensors, incoming.snapshots, strict=False):
            assert _same_bits(tensor, snapshot), "a buffer was changed while it was being sent"
        for into, tensor in zip(self.receives, incoming.tensors, strict=True):
            assert into.shape == tensor.shape, f"{tensor.shape} sent into {into.shape}"
            into.copy_(tensor)
        incoming.taken.set()
        world.wait_for(lambda: self.sent.taken.wait(_POLL_S))
        world.clock_s[rank] = max(
            world.clock_s[rank], incoming.arrival_s, self.sent.arrival_s - world.latency_s
        )
        if world.hostile:
            _spoil(
                tensor
                for tensor in self.sent.tensors
                if tensor.untyped_storage().data_ptr() not in world.protected
            )


class _VirtualControl:
    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self.world, self.rank = world, rank

    def gather(self, numbers: list[int]) -> list[list[int]]:
        self.world.numbers[self.rank] = list(numbers)
        self.world.barrier.wait()
        every = [list(row) for row in self.world.numbers]
        self.world.barrier.wait()
        return every


def _spoil(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        # An index of this size fails loudly wherever it is used.
        tensor.fill_(math.nan if tensor.is_floating_point() else 2**30)


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
