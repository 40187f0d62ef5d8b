"""The way home of partial sums on a ring: one hop behind the compute.

What circulates (experts, or blocks of tokens) collects a sum on its way (the experts' gradients, or
the tokens' outputs and gradients). The sum for an owner starts at the owner's successor (hop 1).
Every later rank computes its share, adds the sum that has arrived meanwhile, and sends the result
on during its next hop. After hop W - 1 the sum goes to the owner, who adds it to the share that it
computed at hop 0; that last message is hidden behind hop 0 of the next slice. W - 1 sends.

                 hop 0      hop 1          hop 2                 hop 0 of the next slice
    compute      own        share of r-1   share of r-2          own
    send                                   sum for r-1           sum for r-2 (W = 3: to its owner)
    receive                                sum for r-2, added    sum for r, added to own

A sum is a list of tensors with the same number of items (experts, or tokens) in dimension 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan_relay.moe.transport import RingExchange

Tensors = list[torch.Tensor]


def items(tensors: Sequence[torch.Tensor], first: int, last: int) -> Tensors:
    """Views of items ``first <= i < last``."""
    return [tensor[first:last] for tensor in tensors]


@dataclass(frozen=True)
class _Lease:
    """The first items of a buffer from the pool."""

    buffer: Tensors
    num_items: int

    @property
    def tensors(self) -> Tensors:
        return items(self.buffer, 0, self.num_items)


@dataclass(frozen=True)
class _Home:
    """This rank's own slice: where its sum is made, and what is returned."""

    own: Tensors
    result: Tensors

    def close(self) -> None:
        if self.own is not self.result:
            for result, own in zip(self.result, self.own, strict=True):
                result.copy_(own)


class HomewardChain:
    """One call's sums over every slice. Per hop: ``post``, ``share``, ``settle``.

    The caller commits and waits around each hop's compute. After the last slice comes one hop 0
    more, without a share.
    """

    def __init__(
        self, num_ranks: int, result: Tensors, longest: int, sum_dtype: torch.dtype | None = None
    ) -> None:
        """Allocate the buffers.

        Args:
            result: this rank's sums, all items of all slices; empty for a chain that does nothing.
            longest: items of the longest slice of any rank.
            sum_dtype: the dtype of summing and of messages; default each tensor's own.
        """
        self._size = num_ranks
        self._result = result
        self._outgoing: _Lease | None = None  # this rank's sum, to be sent during the next hop
        self._arrival: _Lease | None = None  # the predecessor's sum, on its way
        self._share: _Lease | None = None  # what the current hop computes
        self._current: _Home | None = None
        self._waiting: _Home | None = None  # the slice whose sum is still on its way

        def buffer() -> Tensors:
            return [
                tensor.new_empty((longest, *tensor.shape[1:]), dtype=sum_dtype or tensor.dtype)
                for tensor in result
            ]

        in_other_dtype = any(sum_dtype not in (None, tensor.dtype) for tensor in result)
        self._free = [buffer() for _ in range(num_chain_buffers(num_ranks))]
        self._own = [buffer() for _ in range(num_own_buffers(num_ranks, in_other_dtype))]

    def post(self, exchange: RingExchange, hop: int, num_items: int) -> None:
        """Queue the last hop's sum for the successor, and a buffer for the predecessor's.

        ``num_items`` is the length of what this hop computes. To that the arrival will be added,
        and at hop 0 to the slice before.
        """
        if self._outgoing is None:
            return
        if hop == 0:
            assert self._waiting is not None
            num_items = self._waiting.own[0].shape[0]
        self._arrival = self._lease(num_items)
        exchange.send(self._outgoing.tensors)
        exchange.receive(self._arrival.tensors)

    def share(self, hop: int, first: int, last: int) -> Tensors:
        """Where this hop's share of the items ``first <= i < last`` of their owner is made."""
        if not self._result:
            return []
        if hop > 0:
            self._share = self._lease(last - first)
            return self._share.tensors
        result = own = items(self._result, first, last)
        if self._own:
            # In turn: the previous slice's own share may still be waiting for its sum.
            self._own.reverse()
            own = items(self._own[0], 0, last - first)
        self._current = _Home(own, result)
        return own

    def settle(self, hop: int) -> None:
        """After the hop's compute and wait: add what arrived, free what was sent."""
        if self._arrival is not None and self._outgoing is not None:
            if self._share is not None:
                target = self._share.tensors
            else:
                assert self._waiting is not None
                target = self._waiting.own
            for into, arrived in zip(target, self._arrival.tensors, strict=True):
                into.add_(arrived)
            self._free += [self._arrival.buffer, self._outgoing.buffer]
        self._outgoing, self._arrival, self._share = self._share, None, None
        if hop == 0:
            if self._waiting is not None:
                self._waiting.close()
            self._waiting, self._current = self._current, None

    def _lease(self, num_items: int) -> _Lease:
        return _Lease(self._free.pop(), num_items)


def num_chain_buffers(num_ranks: int) -> int:
    """Accumulate, send, receive; at W = 2 a sum is sent home as soon as it is begun."""
    return {1: 0, 2: 2}.get(num_ranks, 3)


def num_own_buffers(num_ranks: int, sums_in_other_dtype: bool) -> int:
    """Own shares held apart from the result, because they are summed in another dtype."""
    if not sums_in_other_dtype:
        return 0
    return 1 if num_ranks == 1 else 2
