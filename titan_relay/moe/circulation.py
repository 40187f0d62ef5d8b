"""A call's way round the ring: messages and sums around the compute, alike in both rings.

At hop h this rank holds a slice of what belongs to rank r - h, a list of tensors with the same
number of items (experts, or tokens) in dimension 0. It starts passing the slice on to r + 1 and
receiving the next from r - 1, and meanwhile the caller computes with what is held. Sums travel home
one hop behind (``homeward_chain``). The rank's own slice is sent from the tensors themselves.

Shape legend: W ranks, S slices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from titan_relay.moe.call import RelayCall
from titan_relay.moe.homeward_chain import HomewardChain, Tensors, items
from titan_relay.moe.shapes import Circulation
from titan_relay.moe.transport import RingExchange, Where


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
