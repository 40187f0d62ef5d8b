"""Ranks of a ring as threads of one process that take turns: one runs until it waits for another.

The layer under test gets a link and a control channel like those of a process group. What a message
is and costs is the business of a kind of world, a subclass: ``loopback`` copies on a device's
streams, and the tests' virtual ring has a clock and a hostile link.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from titan_relay.moe.errors import RingError
from titan_relay.moe.ring import Ring


@dataclass(eq=False)
class Message:
    """What a rank sends in one exchange."""

    tensors: Sequence[torch.Tensor]
    taken: bool = False  # the successor has copied it


AMessage = TypeVar("AMessage", bound=Message)
Result = TypeVar("Result")


class RanksInThreads(ABC, Generic[AMessage]):
    """``size`` ranks; ``run`` calls a function on each of them, with its ring."""

    def __init__(self, size: int, timeout_s: float = 300.0) -> None:
        """``timeout_s``: how long a rank waits for another before all of them fail."""
        self.size = size
        self._timeout_s = timeout_s
        self._turn = threading.Condition()
        self._begin()

    def _begin(self) -> None:
        self._channels: list[deque[AMessage]] = [deque() for _ in range(self.size)]
        self._numbers: list[list[list[int]]] = [[] for _ in range(self.size)]
        self._error: BaseException | None = None

    @abstractmethod
    def post(
        self, rank: int, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> AMessage:
        """``rank`` starts an exchange: what its successor is going to take."""

    @abstractmethod
    def deliver(
        self, rank: int, sent: AMessage, arrived: AMessage, receives: Sequence[torch.Tensor]
    ) -> None:
        """``rank`` waits for its exchange, and the message for it is there: copy it."""

    @abstractmethod
    def give_back(self, rank: int, sent: AMessage, arrived: AMessage) -> None:
        """The exchange of ``rank`` is over: its successor has taken ``sent``."""

    def on_rank(self, rank: int) -> AbstractContextManager:
        """Around everything that ``rank`` does."""
        return nullcontext()

    def run(self, function: Callable[[int, Ring | None], Result]) -> list[Result]:
        """``function(rank, ring)`` on every rank; by rank what they return.

        A rank that raises ends all of them, and its error is raised here.
        """
        self._begin()
        results: dict[int, Result] = {}

        def main(rank: int) -> None:
            ring = None if self.size == 1 else Ring(_Link(self, rank), _Control(self, rank))
            with self._turn:
                try:
                    with self.on_rank(rank):
                        results[rank] = function(rank, ring)
                except BaseException as error:
                    # Ranks that waited for the failed one fail after it, and tell nothing new.
                    if self._error is None:
                        self._error = error
                self._turn.notify_all()

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return [results[rank] for rank in range(self.size)]

    def send(
        self, rank: int, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> AMessage:
        """Start the exchange of ``rank``."""
        sent = self.post(rank, sends, receives)
        self._channels[rank].append(sent)
        self._turn.notify_all()
        return sent

    def finish(self, rank: int, sent: AMessage, receives: Sequence[torch.Tensor]) -> None:
        """Wait until the exchange of ``rank`` is over."""
        channel = self._channels[(rank - 1) % self.size]
        self._wait_until(lambda: bool(channel))
        arrived = channel.popleft()
        self.deliver(rank, sent, arrived, receives)
        arrived.taken = True
        self._turn.notify_all()
        self._wait_until(lambda: sent.taken)
        self.give_back(rank, sent, arrived)

    def gather(self, rank: int, numbers: list[int]) -> list[list[int]]:
        """All ranks' numbers of the same call."""
        mine = self._numbers[rank]
        mine.append(list(numbers))
        self._turn.notify_all()
        self._wait_until(lambda: all(len(calls) >= len(mine) for calls in self._numbers))
        return [list(calls[len(mine) - 1]) for calls in self._numbers]

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        self._turn.wait_for(lambda: self._error is not None or condition(), self._timeout_s)
        if not condition():
            raise RingError("a rank waited in vain for another in the same process")


def copy_into(receives: Sequence[torch.Tensor], arrived: Message) -> None:
    """Pairwise in order; each must have the shape that was sent."""
    for into, tensor in zip(receives, arrived.tensors, strict=True):
        assert into.shape == tensor.shape, f"{tensor.shape} sent into {into.shape}"
        into.copy_(tensor)


@dataclass(frozen=True)
class _Control:
    world: RanksInThreads
    rank: int

    def gather(self, numbers: list[int]) -> list[list[int]]:
        return self.world.gather(self.rank, numbers)


class _Link:
    def __init__(self, world: RanksInThreads, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def start(
        self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> "_Transfers":
        sent = self.world.send(self.rank, list(sends), receives)
        return _Transfers(self.world, self.rank, sent, list(receives))


@dataclass(frozen=True)
class _Transfers:
    world: RanksInThreads
    rank: int
    sent: Message
    receives: list[torch.Tensor]

    def wait(self) -> None:
        self.world.finish(self.rank, self.sent, self.receives)
