"""Bytes that each ring would send, and the choice between the rings.

Per rank, with W ranks, ``e`` experts of a rank of ``P = 3 D F`` elements, ``b`` bytes per element,
``bg`` per element of a summed gradient, and ``m = K (bs + 4)`` bytes of scores and rows per token:

    experts   forward  (W - 1) e P b            backward  (W - 1) e P (b + bg)
    tokens    forward  (W - 1) T (2 D b + m)    backward  (W - 1) T (3 D b + m + K bs)

Everything here is static and equal on all ranks, so all choose alike without talking. With
``options.max_imbalance`` a call's routing may turn tokens into experts (``layer``).
"""

from dataclasses import dataclass

from titan_relay.moe.options import RelayOptions
from titan_relay.moe.shapes import Circulation, LayerShape


@dataclass(frozen=True)
class Traffic:
    """Bytes sent by each rank in one direction of one layer, and the ring chosen for it.

    The bytes are those with every gradient wanted; biases and the few numbers of the control group
    are included and left out, respectively.
    """

    experts_bytes: int
    tokens_bytes: int
    circulate: Circulation


def circulations(traffic: Traffic, options: RelayOptions) -> tuple[Circulation, ...]:
    """What may circulate, whatever the routing: the chosen one, and experts if it may turn."""
    if traffic.circulate == "tokens" and options.max_imbalance is not None:
        return ("tokens", "experts")
    return (traffic.circulate,)


def forward_traffic(shape: LayerShape, options: RelayOptions) -> Traffic:
    token_bytes = 2 * shape.hidden_bytes + shape.scores_bytes + shape.rows_bytes
    return _traffic(shape, options, shape.dtype.itemsize, token_bytes)


def backward_traffic(shape: LayerShape, options: RelayOptions) -> Traffic:
    element_bytes = shape.dtype.itemsize + options.sum_dtype(shape.dtype).itemsize
    token_bytes = 3 * shape.hidden_bytes + 2 * shape.scores_bytes + shape.rows_bytes
    return _traffic(shape, options, element_bytes, token_bytes)


def _traffic(
    shape: LayerShape, options: RelayOptions, element_bytes: int, token_bytes: int
) -> Traffic:
    hops = shape.num_ranks - 1
    experts_bytes = hops * shape.num_local_experts * shape.expert_numel * element_bytes
    tokens_bytes = hops * shape.num_tokens * token_bytes
    circulate: Circulation
    if options.circulate == "auto":
        # Equal bytes: experts, whose work per rank does not depend on the routing.
        circulate = "experts" if experts_bytes <= tokens_bytes else "tokens"
    else:
        circulate = options.circulate
    return Traffic(experts_bytes, tokens_bytes, circulate)
