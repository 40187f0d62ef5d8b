"""What forward and backward of the ring of tokens share: blocks of tokens and their routing.

Shape legend: T tokens of this rank, t tokens of a block, K top-k, n = t * K rows of a block, W
ranks, S slices, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from titan_relay.moe.call import RelayCall
from titan_relay.moe.homeward_chain import Tensors
from titan_relay.moe.routing import Segment, TokenSlices, segments
from titan_relay.moe.transport import RingExchange


@dataclass(frozen=True)
class TokenRouting:
    """The counts of every rank's slices and experts, known to all ranks."""

    slices: TokenSlices
    counts_WSE: Sequence[Sequence[Sequence[int]]]
    top_k: int
    num_local_experts: int

    def num_tokens(self, rank: int, slice_index: int) -> int:
        return sum(self.counts_WSE[rank][slice_index]) // self.top_k

    def imbalance(self) -> float:
        """Rows of the rank whose experts get the most, over the mean; 1 without rows."""
        slices = [counts_E for counts_SE in self.counts_WSE for counts_E in counts_SE]
        totals_E = [sum(counts) for counts in zip(*slices, strict=True)]
        share = self.num_local_experts
        received = [
            sum(totals_E[first : first + share]) for first in range(0, len(totals_E), share)
        ]
        return max(received) * len(received) / sum(received) if sum(received) else 1.0

    def segments(self, owner: int, slice_index: int, visited: int) -> list[Segment]:
        """The rows of ``owner``'s block that go to the experts of rank ``visited``."""
        bounds = [0]
        for count in self.counts_WSE[owner][slice_index]:
            bounds.append(bounds[-1] + count)
        first = visited * self.num_local_experts
        return segments(bounds, first, first + self.num_local_experts)


@dataclass(frozen=True)
class BlockBuffers:
    """Receive buffers for visiting blocks: the one in use and the one arriving."""

    buffers: list[Tensors]
    top_k: int

    @staticmethod
    def like(call: RelayCall, own: Tensors, length: int) -> "BlockBuffers":
        """Buffers for blocks of up to ``length`` tokens; ``own`` are x, rows and what else goes.

        A block's rows come last and are ``K`` per token.
        """
        *per_token, rows_n = own

        def buffer() -> Tensors:
            tensors = [tensor.new_empty((length, *tensor.shape[1:])) for tensor in per_token]
            return [*tensors, rows_n.new_empty(length * call.shape.top_k)]

        return BlockBuffers(
            [buffer() for _ in range(num_block_buffers(call.num_ranks))], call.shape.top_k
        )

    def view(self, index: int, num_tokens: int) -> Tensors:
        *per_token, rows_n = self.buffers[index]
        return [*(tensor[:num_tokens] for tensor in per_token), rows_n[: num_tokens * self.top_k]]

    def post(
        self, exchange: RingExchange | None, held: Tensors, hop: int, next_num_tokens: int
    ) -> Tensors | None:
        """Queue passing ``held`` on; where the next block arrives, or None at the last hop.

        Both sides know the length of every block, so messages have exactly that length.
        """
        if exchange is None or hop == exchange.size - 1:
            return None
        arriving = self.view(hop % 2, next_num_tokens)
        exchange.send(held)
        exchange.receive(arriving)
        return arriving


def num_block_buffers(num_ranks: int) -> int:
    return min(2, num_ranks - 1)
