"""A call's way round the ring and home: messages and sums around the compute, alike in both rings.

At hop h this rank holds a slice of what belongs to rank r - h, a list of tensors with the same
number of items (experts, or tokens) in dimension 0. It starts passing the slice on to r + 1 and
receiving the next from r - 1, and meanwhile the caller computes with what is held. The rank's own
slice is sent from the tensors themselves.

What circulates collects a sum on its way (the experts' gradients, or the tokens' outputs and
gradients), one hop behind the compute. The sum for an owner starts at the owner's successor (hop
1). Every later rank computes its share, adds the sum that has arrived meanwhile, and sends the
result on during its next hop. After hop W - 1 the sum goes to the owner, who adds it to the share
that it computed at hop 0; that last message is hidden behind hop 0 of the next slice. W - 1 sends.

                 hop 0      hop 1          hop 2                 hop 0 of the next slice
    compute      own        share of r-1   share of r-2          own
    send                                   sum for r-1           sum for r-2 (W = 3: to its owner)
    receive                                sum for r-2, added    sum for r, added to own

Shape legend: W ranks, S slices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from titan_relay.moe.call import RelayCall
from titan_relay.moe.shapes import Circulation
from titan_relay.moe.transport import RingExchange, Where

Tensors = list[torch.Tensor]


def num_passing_buffers(num_ranks: int) -> int:
    """The slice in use and the one arriving, as far as neither is this rank's."""
    return min(2, num_ranks - 1)


@dataclass(frozen=True)
class Visit:
    """One hop: rank ``owner``'s tensors of a slice, and where the sums of its items are made."""

    owner: int
    slice_index: int
    held: Tensors
    share: Tensors


@dataclass(frozen=True)
class Slices:
    """How many items each rank has in each slice, and at most: that fixes the buffers."""

    lengths_WS: Sequence[Sequence[int]]
    longest: int


def visits(
    call: RelayCall,
    circulate: Circulation,
    own: Tensors,
    result: Tensors,
    slices: Slices,
    sum_dtype: torch.dtype | None = None,
) -> Iterator[Visit]:
    """Every slice's hops; the caller computes one before it asks for the next.

    Args:
        own: this rank's tensors, contiguous, all items of all slices.
        result: this rank's sums, complete at the end; empty where nothing comes home.
        sum_dtype: the dtype of summing and of its messages; default each tensor's own.
    """
    num_ranks, longest = call.num_ranks, slices.longest
    exchange = RingExchange(None if call.ring is None else call.ring.link)
    chain = HomewardChain(num_ranks, result, longest, sum_dtype)
    buffers = [
        [tensor.new_empty((longest, *tensor.shape[1:])) for tensor in own]
        for _ in range(num_passing_buffers(num_ranks))
    ]
    last = 0
    for index, length in enumerate(slices.lengths_WS[call.rank]):
        first, last = last, last + length
        held = arriving = items(own, first, last)
        for hop in range(num_ranks):
            owner, next_owner = call.owner(hop), call.owner(hop + 1)
            if hop < num_ranks - 1:
                # Two buffers in turn: what is held lies in the other one, or is this rank's own.
                # Both sides know the length of every slice: messages have exactly that length.
                arriving = items(buffers[hop % 2], 0, slices.lengths_WS[next_owner][index])
                exchange.send(held)
                exchange.receive(arriving)
            num_items = slices.lengths_WS[owner][index]
            chain.post(exchange, hop, num_items)
            share = chain.share(hop, first, first + num_items)
            # Started ahead of the compute that hides it.
            exchange.commit(Where(call.options.layer, call.operation, index, hop))
            yield Visit(owner, index, held, share)
            exchange.wait()
            chain.settle(hop)
            held = arriving
    # After the last slice: the one message that has no compute to hide behind.
    chain.post(exchange, 0, 0)
    exchange.commit(Where(call.options.layer, call.operation, index, num_ranks))
    exchange.wait()
    chain.settle(0)
    exchange.close()
    if call.ring is not None:
        telemetry, experts = call.ring.telemetry, circulate == "experts"
        telemetry.add(call.options.layer, call.operation, exchange.counts, experts=experts)


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
