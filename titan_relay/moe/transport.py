"""Messages between neighbours of a ring (queue, commit, wait), and its host-side channel.

One exchange is queued (``send``, ``receive``), started (``commit``) before the compute that hides
it, and finished (``wait``) after it. Every rank issues the same sequence of exchanges with the same
sizes; nothing depends on tags, because some backends ignore them. The order is guarded here rather
than trusted: a broken ring shows as an error, not as a wrong number or a hang.

Over the host-side channel (``Control``) every rank shows a few numbers per call to every other.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from titan_relay.moe.errors import RingError, RingMisuseError
from titan_relay.moe.telemetry import RingCounts
from titan_relay.private_torch import group_named, set_group_timeout


@dataclass(frozen=True)
class Where:
    """The place of an exchange in the program, for error messages."""

    layer: str
    operation: str
    slice: int
    hop: int

    def __str__(self) -> str:
        layer = f"layer {self.layer!r}, " if self.layer else ""
        return f"{layer}{self.operation}, slice {self.slice}, hop {self.hop}"


class Transfers(Protocol):
    """Started messages."""

    def wait(self) -> None: ...


class Link(Protocol):
    """A rank's connection to its two neighbours on a ring of ``size`` ranks."""

    rank: int
    size: int

    def start(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Transfers:
        """Start sending to ``rank + 1`` and receiving from ``rank - 1``, pairwise in order."""
        ...


class RingExchange:
    """The exchanges of one call, at most one of them under way; on a ring of one without a link.

    Buffers may be reused as soon as ``wait`` has returned and not before.
    """

    def __init__(self, link: Link | None) -> None:
        self._link = link
        self._sends: list[torch.Tensor] = []
        self._receives: list[torch.Tensor] = []
        self._started: Transfers | None = None
        self._where: Where | None = None
        self.counts = RingCounts()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Queue ``tensors`` for the next rank; they must stay untouched until ``wait``."""
        self._check_can_queue(tensors)
        self._sends += tensors

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Queue buffers for what the previous rank sends; undefined until ``wait``."""
        self._check_can_queue(tensors)
        self._receives += tensors

    def commit(self, where: Where) -> None:
        """Start everything queued. Does nothing when nothing is queued."""
        if self._started is not None:
            raise RingMisuseError(f"commit at {where} before the exchange of {self._where} ended")
        if not self._sends and not self._receives:
            return
        _check_distinct(self._sends, self._receives, where)
        assert self._link is not None, "a ring of one has nothing to exchange"
        self._where = where
        try:
            self._started = self._link.start(self._sends, self._receives)
        except RuntimeError as error:
            raise self._failure("could not start", error) from error

    def wait(self) -> None:
        """Finish the exchange under way. Does nothing when there is none."""
        if self._started is None:
            if self._sends or self._receives:
                raise RingMisuseError("wait for an exchange that was queued but not committed")
            return
        begin = time.perf_counter()
        try:
            self._started.wait()
        except RuntimeError as error:
            raise self._failure("did not finish", error) from error
        self.counts += RingCounts(
            num_messages=len(self._sends),
            sent_bytes=sum(tensor.nbytes for tensor in self._sends),
            wait_seconds=time.perf_counter() - begin,
        )
        self._sends, self._receives, self._started = [], [], None

    def close(self) -> None:
        """Raise if something is still queued or under way."""
        if self._sends or self._receives:
            raise RingMisuseError(f"a call ended with the exchange of {self._where} open")

    def _check_can_queue(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._started is not None:
            raise RingMisuseError(f"queue while the exchange of {self._where} is under way")
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise RingMisuseError(f"a message of shape {tuple(tensor.shape)} is not contiguous")

    def _failure(self, what: str, error: RuntimeError) -> RingError:
        assert self._link is not None
        rank, size = self._link.rank, self._link.size
        before, after = (rank - 1) % size, (rank + 1) % size
        return RingError(
            f"ring rank {rank} of {size}: the exchange at {self._where} {what} "
            f"(receiving from ring rank {before}, sending to ring rank {after}): {error}"
        )


class ProcessGroupLink:
    """Messages over a ``torch.distributed`` process group that carries nothing else.

    On NCCL the messages of one exchange form one group call on the communicator's own stream,
    which waits for the current stream first; ``wait`` makes the current stream wait for it, and
    the works keep their tensors alive until then. On gloo ``wait`` blocks the process.

    The group is known by its name: the one that refers to it is torch, whose
    ``destroy_process_group()`` thus ends its threads, also where a caller keeps the ring.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.rank = dist.get_rank(group)
        self.size = group.size()
        self._group_name = group.group_name
        self.timeout = timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait this long for a neighbour from now on."""
        self.timeout = timeout
        set_group_timeout(timeout, group_named(self._group_name))

    def start(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Transfers:
        group = group_named(self._group_name)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=after) for tensor in sends
        ]
        operations += [
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=before) for tensor in receives
        ]
        return _Works(dist.batch_isend_irecv(operations), self.timeout)


@dataclass
class _Works:
    works: list[dist.Work]
    timeout: timedelta

    def wait(self) -> None:
        for work in self.works:
            work.wait(self.timeout)


def _check_distinct(
    sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor], where: Where
) -> None:
    """No buffer that is received into may share a byte with another of the same exchange."""
    spans = [(_span(tensor), True) for tensor in receives]
    spans += [(_span(tensor), False) for tensor in sends]
    spans.sort()
    for ((_, end), first_receives), ((start, _), second_receives) in itertools.pairwise(spans):
        if start < end and (first_receives or second_receives):
            raise RingMisuseError(f"{where}: a receive buffer overlaps another message's buffer")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr() if tensor.numel() else 0
    return start, start + tensor.nbytes


class Control(Protocol):
    """All-gather of equally many integers from each rank, without touching a device."""

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Everybody's ``numbers`` by rank. Raises RuntimeError if a rank does not come."""
        ...


class ProcessGroupControl:
    """Over a gloo group of its own, so that it never waits for a device or mixes with messages.

    Known by its name, as a link's is.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group_name = group.group_name

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait this long for the other ranks from now on."""
        set_group_timeout(timeout, group_named(self._group_name))

    def gather(self, numbers: list[int]) -> list[list[int]]:
        group = group_named(self._group_name)
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        every = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(every, mine, group=group)
        return [row.tolist() for row in every]


class NoControl:
    """Of a group with the fake backend, whose other ranks do not exist."""

    def gather(self, numbers: list[int]) -> list[list[int]]:
        raise RuntimeError("the group has the fake backend; run the layer on fake tensors")
