"""A ring of several ranks in one process on one device: for trying out and measuring a layer.

Each rank is a thread. Threads take turns: one runs until it waits for another. On a CUDA device a
rank has a stream for its compute and another for the messages that it receives, and a message is a
copy on the latter; so both rings, their buffers and the order of the streams are those of a run on
several devices, except that bandwidth is that of the device's own memory and all compute shares
one chip.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from titan_relay.moe.errors import RingError
from titan_relay.moe.ring import Ring

_PATIENCE_S = 300.0
Result = TypeVar("Result")


class _AbandonedError(RingError):
    """Another rank has failed, so that what this one waits for will not come."""


@dataclass
class _Message:
    tensors: Sequence[torch.Tensor]
    ready: torch.cuda.Event | None  # the sender has written it
    taken: bool = False
    copied: torch.cuda.Event | None = None


@dataclass(frozen=True)
class _Streams:
    compute: torch.cuda.Stream
    messages: torch.cuda.Stream


@dataclass(eq=False)
class LoopbackWorld:
    """``size`` ranks; ``run`` calls a function on each of them, with its ring.

    The streams are made once, so that an allocator keeps their memory from one run to the next.
    """

    size: int
    device: torch.device
    _turn: threading.Condition = field(default_factory=threading.Condition, init=False)
    _channels: list[deque[_Message]] = field(default_factory=list, init=False)
    _numbers: list[list[list[int]]] = field(default_factory=list, init=False)
    _streams: list[_Streams] = field(default_factory=list, init=False)
    _failed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self._streams = [
                _Streams(torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
                for _ in range(self.size)
            ]

    def run(self, function: Callable[[int, Ring | None], Result]) -> list[Result]:
        """``function(rank, ring)`` on every rank; by rank what they return.

        Waits for the device before and after. If ranks raise, the error of the first is raised.
        """
        self._channels = [deque() for _ in range(self.size)]
        self._numbers = [[] for _ in range(self.size)]
        self._failed = False
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def main(rank: int) -> None:
            ring = None if self.size == 1 else Ring(_Link(self, rank), _Control(self, rank))
            with self._turn:
                try:
                    with self._on_compute_stream(rank):
                        results[rank] = function(rank, ring)
                except BaseException as error:
                    # A rank that waited for the failed one has nothing of its own to tell.
                    if not isinstance(error, _AbandonedError):
                        errors.append(error)
                    self._failed = True
                self._turn.notify_all()

        self._synchronize()
        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._synchronize()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.size)]

    def post(self, rank: int, message: _Message) -> None:
        """Leave a message for the rank's successor."""
        self._channels[rank].append(message)
        self._turn.notify_all()

    def take(self, rank: int) -> _Message:
        """The next message from the rank's predecessor."""
        channel = self._channels[(rank - 1) % self.size]
        self._wait_until(lambda: bool(channel))
        return channel.popleft()

    def hand_over(self, message: _Message, copied: torch.cuda.Event | None) -> None:
        message.taken, message.copied = True, copied
        self._turn.notify_all()

    def wait_until_taken(self, message: _Message) -> None:
        self._wait_until(lambda: message.taken)

    def gather(self, rank: int, numbers: list[int]) -> list[list[int]]:
        """All ranks' numbers of the same call."""
        mine = self._numbers[rank]
        mine.append(numbers)
        self._turn.notify_all()
        self._wait_until(lambda: all(len(calls) >= len(mine) for calls in self._numbers))
        return [list(calls[len(mine) - 1]) for calls in self._numbers]

    def event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def streams(self, rank: int) -> _Streams | None:
        return self._streams[rank] if self._streams else None

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        self._turn.wait_for(lambda: self._failed or condition(), _PATIENCE_S)
        if condition():
            return
        if self._failed:
            raise _AbandonedError("another rank of the loop-back ring has failed")
        raise RingError("a rank of the loop-back ring waited in vain")

    @contextmanager
    def _on_compute_stream(self, rank: int) -> Iterator[None]:
        streams = self.streams(rank)
        if streams is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(streams.compute):
            yield

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class _Control:
    world: LoopbackWorld
    rank: int

    def gather(self, numbers: list[int]) -> list[list[int]]:
        return self.world.gather(self.rank, numbers)


class _Link:
    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def start(
        self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> "_Transfers":
        streams = self.world.streams(self.rank)
        # What is sent has been written, and what is received into is free, once this has passed.
        ready = None if streams is None else self.world.event(streams.compute)
        sent = _Message(list(sends), ready)
        self.world.post(self.rank, sent)
        return _Transfers(self.world, self.rank, sent, list(receives))


@dataclass(frozen=True)
class _Transfers:
    world: LoopbackWorld
    rank: int
    sent: _Message
    receives: list[torch.Tensor]

    def wait(self) -> None:
        """Copy what arrives; the compute stream waits for that, and until what was sent is read.

        Buffers were allocated on compute streams, whose allocator reuses their memory in the
        order of that stream. Because it waits here for every copy that touches them, memory that
        is freed later is free indeed, and nothing needs ``record_stream``.
        """
        arrived = self.world.take(self.rank)
        streams = self.world.streams(self.rank)
        if streams is None:
            self._copy(arrived)
            self.world.hand_over(arrived, None)
            self.world.wait_until_taken(self.sent)
            return
        assert self.sent.ready is not None
        assert arrived.ready is not None
        with torch.cuda.stream(streams.messages):
            streams.messages.wait_event(self.sent.ready)
            streams.messages.wait_event(arrived.ready)
            self._copy(arrived)
        copied = self.world.event(streams.messages)
        self.world.hand_over(arrived, copied)
        streams.compute.wait_event(copied)
        self.world.wait_until_taken(self.sent)
        assert self.sent.copied is not None
        streams.compute.wait_event(self.sent.copied)

    def _copy(self, arrived: _Message) -> None:
        for into, tensor in zip(self.receives, arrived.tensors, strict=True):
            assert into.shape == tensor.shape, f"{tensor.shape} sent into {into.shape}"
            into.copy_(tensor)
