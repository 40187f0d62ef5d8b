"""The way home of weight gradients in a ring of experts: one hop behind the compute.

The gradients of an owner's slice start at the owner's successor (hop 1). Every later rank computes
its share, adds the sum that has arrived meanwhile, and sends the result on during its next hop.
After hop W - 1 the sum goes to the owner, who adds it to the share computed at hop 0; that last
message is hidden behind hop 0 of the next slice.

                 hop 0      hop 1          hop 2                 hop 0 of the next slice
    compute      own        share of r-1   share of r-2          own
    send                                   sum for r-1           sum for r-2 (W = 3: to its owner)
    receive                                sum for r-2, added    sum for r, added to own
"""

from dataclasses import dataclass

from relay_kernels import ExpertWeights
from titan_relay.moe.call import RelayCall
from titan_relay.moe.transport import RingExchange


@dataclass(frozen=True)
class _Lease:
    """The first experts of a buffer from the pool."""

    buffer: ExpertWeights
    num_experts: int

    @property
    def weights(self) -> ExpertWeights:
        return self.buffer.experts(0, self.num_experts)


@dataclass(frozen=True)
class _Home:
    """This rank's own slice: where its sum is made, and the gradient that is returned."""

    own: ExpertWeights
    result: ExpertWeights

    def close(self) -> None:
        if self.own is not self.result:
            for result, own in zip(self.result.tensors(), self.own.tensors(), strict=True):
                result.copy_(own)


class GradientChain:
    """One backward's chain over every slice. Per hop: ``post``, ``share``, ``settle``."""

    def __init__(self, call: RelayCall, result: ExpertWeights, longest: int) -> None:
        """``result`` receives this rank's gradients; ``longest`` is the longest slice."""
        self._size = call.num_ranks
        self._result = result
        self._outgoing: _Lease | None = None  # this rank's sum, to be sent during the next hop
        self._arrival: _Lease | None = None  # the predecessor's sum, on its way
        self._share: _Lease | None = None  # what the current hop computes
        self._current: _Home | None = None
        self._waiting: _Home | None = None  # the slice whose sum is still on its way
        sum_dtype = call.options.sum_dtype(call.shape.dtype)
        self._free = [
            result.empty_like(longest, sum_dtype) for _ in range(num_chain_buffers(self._size))
        ]
        self._own = [
            result.empty_like(longest, sum_dtype)
            for _ in range(num_own_buffers(self._size, sum_dtype != call.shape.dtype))
        ]

    def post(self, exchange: RingExchange | None) -> None:
        """Queue the last hop's sum for the successor, and a buffer for the predecessor's."""
        if exchange is None or self._outgoing is None:
            return
        self._arrival = self._lease(self._outgoing.num_experts)
        exchange.send(self._outgoing.weights.tensors())
        exchange.receive(self._arrival.weights.tensors())

    def share(self, hop: int, first: int, last: int) -> ExpertWeights:
        """The buffers in which this hop's gradients are to be written."""
        if hop > 0:
            self._share = self._lease(last - first)
            return self._share.weights
        result = own = self._result.experts(first, last)
        if self._own:
            # In turn: the previous slice's own share may still be waiting for its sum.
            self._own.reverse()
            own = self._own[0].experts(0, last - first)
        self._current = _Home(own, result)
        return own

    def settle(self, hop: int) -> None:
        """After the hop's compute and wait: add what arrived, free what was sent."""
        if self._arrival is not None and self._outgoing is not None:
            if self._share is not None:
                target = self._share.weights
            else:
                assert self._waiting is not None
                target = self._waiting.own
            for into, arrived in zip(
                target.tensors(), self._arrival.weights.tensors(), strict=True
            ):
                into.add_(arrived)
            self._free += [self._arrival.buffer, self._outgoing.buffer]
        self._outgoing, self._arrival, self._share = self._share, None, None
        if hop == 0:
            if self._waiting is not None:
                self._waiting.close()
            self._waiting, self._current = self._current, None
            if self._size == 1 and self._waiting is not None:
                self._waiting.close()
                self._waiting = None

    def _lease(self, num_experts: int) -> _Lease:
        return _Lease(self._free.pop(), num_experts)


def num_chain_buffers(num_ranks: int) -> int:
    """Accumulate, send, receive; at W = 2 a sum is sent home as soon as it is begun."""
    return {1: 0, 2: 2}.get(num_ranks, 3)


def num_own_buffers(num_ranks: int, sums_in_other_dtype: bool) -> int:
    """Own shares held apart from the result, because they are summed in another dtype."""
    if not sums_in_other_dtype:
        return 0
    return 1 if num_ranks == 1 else 2
