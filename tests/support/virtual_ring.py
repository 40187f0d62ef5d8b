"""A ring of virtual ranks in one process: threads, simulated links, and a virtual clock.

Two uses. With ``latency_s`` and ``bytes_per_s`` the links take exactly the time that they should on
a clock of each rank that only links and ``advance`` move, so that overlap can be computed rather
than measured. With ``hostile=True`` a link delivers as late as it may and spoils every buffer the
moment its owner gives it up: a receive buffer when it is queued, a sent buffer when the wait for it
is over; and it notices a buffer changed while it was being sent.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from layer_check.ranks_in_threads import Message, RanksInThreads, copy_into


@dataclass(eq=False)
class _Message(Message):
    arrival_s: float = 0.0
    snapshots: list[torch.Tensor] = field(default_factory=list)


class VirtualWorld(RanksInThreads[_Message]):
    """``size`` virtual ranks."""

    def __init__(
        self,
        size: int,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float = math.inf,
        hostile: bool = False,
    ) -> None:
        super().__init__(size, timeout_s=60.0)
        self.latency_s, self.bytes_per_s, self.hostile = latency_s, bytes_per_s, hostile
        self.clock_s = [0.0] * size
        self.sent_bytes = [0] * size
        self.link_free_s = [0.0] * size
        self.protected: set[int] = set()

    def protect(self, tensors: Iterable[torch.Tensor]) -> None:
        """The caller's own tensors are never spoilt."""
        self.protected |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def advance(self, rank: int, seconds: float) -> None:
        """``rank`` computes for ``seconds`` of its clock."""
        self.clock_s[rank] += seconds

    def post(
        self, rank: int, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> _Message:
        num_bytes = sum(tensor.nbytes for tensor in sends)
        self.sent_bytes[rank] += num_bytes
        begin_s = max(self.clock_s[rank], self.link_free_s[rank])
        self.link_free_s[rank] = begin_s + num_bytes / self.bytes_per_s
        snapshots = [tensor.clone() for tensor in sends] if self.hostile else []
        if self.hostile:
            _spoil(receives)
        return _Message(sends, False, self.link_free_s[rank] + self.latency_s, snapshots)

    def deliver(
        self, rank: int, sent: _Message, arrived: _Message, receives: Sequence[torch.Tensor]
    ) -> None:
        for tensor, snapshot in zip(arrived.tensors, arrived.snapshots, strict=False):
            assert _same_bits(tensor, snapshot), "a buffer was changed while it was being sent"
        copy_into(receives, arrived)

    def give_back(self, rank: int, sent: _Message, arrived: _Message) -> None:
        sent_s = sent.arrival_s - self.latency_s
        self.clock_s[rank] = max(self.clock_s[rank], arrived.arrival_s, sent_s)
        if self.hostile:
            _spoil(
                tensor
                for tensor in sent.tensors
                if tensor.untyped_storage().data_ptr() not in self.protected
            )


def _spoil(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        # An index of this size fails loudly wherever it is used.
        tensor.fill_(math.nan if tensor.is_floating_point() else 2**30)


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
