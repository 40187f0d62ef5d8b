"""What one call of the op works with: shape, options, activation and the ring, read once."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from relay_kernels import ExpertWeights, SwiGLU
from titan_relay.moe.options import RelayOptions
from titan_relay.moe.ring import Ring, relay_ring
from titan_relay.moe.shapes import LayerShape
from titan_relay.moe.transport import RingExchange, Where


@dataclass(frozen=True)
class RelayCall:
    """The state of one forward or backward on one rank; nothing of it outlives the call."""

    shape: LayerShape
    options: RelayOptions
    activation: SwiGLU
    ring: Ring | None
    operation: str

    @property
    def num_ranks(self) -> int:
        return self.shape.num_ranks

    def exchange(self) -> "RingExchange | None":
        """A fresh sequence of exchanges, or None on a ring of one."""
        return None if self.ring is None else RingExchange(self.ring.link)

    def finish(self, exchange: "RingExchange | None") -> None:
        """Close the exchanges and report them."""
        if exchange is None or self.ring is None:
            return
        exchange.close()
        self.ring.telemetry.add(self.options.layer, self.operation, exchange.counts)

    def where(self, slice_index: int, hop: int) -> Where:
        return Where(self.options.layer, self.operation, slice_index, hop)


def find_ring(group_name: str) -> Ring | None:
    """The ring of a process group given by name; "" and groups of one have none."""
    if not group_name:
        return None
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    return None if group.size() == 1 else relay_ring(group)


def layer_shape(
    x_TD: torch.Tensor, scores_TK: torch.Tensor, weights: ExpertWeights, num_ranks: int
) -> LayerShape:
    return LayerShape(
        num_ranks=num_ranks,
        num_tokens=x_TD.shape[0],
        dim=x_TD.shape[1],
        expert_dim=weights.w1_gFD.shape[1],
        num_experts=weights.num_experts * num_ranks,
        top_k=scores_TK.shape[1],
        dtype=x_TD.dtype,
        has_biases=weights.b1_gF is not None,
    )
