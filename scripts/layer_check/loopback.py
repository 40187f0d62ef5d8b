"""A ring of several ranks in one process on one device: for trying out and measuring a layer.

On a CUDA device a rank has a stream for its compute and another for the messages that it receives,
and a message is a copy on the latter; so both rings, their buffers and the order of the streams are
those of a run on several devices, except that bandwidth is that of the device's own memory and all
compute shares one chip.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from layer_check.ranks_in_threads import Message, RanksInThreads, Result, copy_into
from titan_relay.moe.ring import Ring


@dataclass(eq=False)
class _Message(Message):
    ready: torch.cuda.Event | None = None  # the sender has written it
    copied: torch.cuda.Event | None = None


@dataclass(frozen=True)
class _Streams:
    compute: torch.cuda.Stream
    messages: torch.cuda.Stream


class LoopbackWorld(RanksInThreads[_Message]):
    """``size`` ranks on ``device``.

    The streams are made once, so that an allocator keeps their memory from one run to the next.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size)
        self._device = device
        self._streams: list[_Streams] = []
        if device.type == "cuda":
            self._streams = [
                _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device)) for _ in range(size)
            ]

    def run(self, function: Callable[[int, Ring | None], Result]) -> list[Result]:
        """As of any ranks in threads; waits for the device before and after."""
        self._synchronize()
        try:
            return super().run(function)
        finally:
            self._synchronize()

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        if not self._streams:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams[rank].compute):
            yield

    def post(
        self, rank: int, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> _Message:
        # What is sent has been written, and what is received into is free, once this has passed.
        ready = self._streams[rank].compute.record_event() if self._streams else None
        return _Message(sends, ready=ready)

    def deliver(
        self, rank: int, sent: _Message, arrived: _Message, receives: Sequence[torch.Tensor]
    ) -> None:
        if not self._streams:
            copy_into(receives, arrived)
            return
        assert sent.ready is not None
        assert arrived.ready is not None
        messages = self._streams[rank].messages
        with torch.cuda.stream(messages):
            messages.wait_event(sent.ready)
            messages.wait_event(arrived.ready)
            copy_into(receives, arrived)
        arrived.copied = messages.record_event()

    def give_back(self, rank: int, sent: _Message, arrived: _Message) -> None:
        """The compute stream waits for what arrived, and until what was sent is read.

        Buffers were allocated on compute streams, whose allocator reuses their memory in the
        order of that stream. Because it waits here for every copy that touches them, memory that
        is freed later is free indeed, and nothing needs ``record_stream``.
        """
        for message in (arrived, sent) if self._streams else ():
            assert message.copied is not None
            self._streams[rank].compute.wait_event(message.copied)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
