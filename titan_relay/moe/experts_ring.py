"""What forward and backward of the ring of experts share: how a slice of weights is passed on."""

from relay_kernels import ExpertWeights
from titan_relay.moe.call import RelayCall
from titan_relay.moe.transport import RingExchange


def weight_buffers(call: RelayCall, weights: ExpertWeights, longest: int) -> list[ExpertWeights]:
    """Receive buffers: the slice in use and the one arriving, as far as neither is this rank's."""
    return [weights.empty_like(longest) for _ in range(num_weight_buffers(call.num_ranks))]


def num_weight_buffers(num_ranks: int) -> int:
    return min(2, num_ranks - 1)


def post_weights(
    exchange: RingExchange | None, held: ExpertWeights, buffers: list[ExpertWeights], hop: int
) -> ExpertWeights | None:
    """Queue passing ``held`` on; where the next slice arrives, or None at the last hop."""
    if exchange is None or hop == exchange.size - 1:
        return None
    # Two buffers in turn: at hop h the slice held lies in the other one (or is this rank's own).
    arriving = buffers[hop % 2].experts(0, held.num_experts)
    exchange.send(held.tensors())
    exchange.receive(arriving.tensors())
    return arriving
