"""Keys of what a block keeps between forward and backward when its experts meet on the relay."""

from dataclasses import dataclass
from typing import Literal

from titan_relay.config.option import option


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRetentionConfig:
    """What each block keeps for backward, with relay.dispatcher = "relay".

    The experts' half keeps nothing at all, so what is left to choose is attention. With
    relay.dispatcher = "alltoall" see [activation_checkpoint] instead.
    """

    mode: Literal["recompute"] = option("recompute", titan="")
    """recompute: keep each block's input and which experts were chosen, nothing else; the block is
    computed again in backward, the ring and the experts are not."""
