"""What one call of the op works with: shape, options, activation and the ring, read once."""

from dataclasses import dataclass

import torch

from relay_kernels import ExpertWeights, SwiGLU
from titan_relay.moe.options import RelayOptions
from titan_relay.moe.ring import Ring, relay_ring
from titan_relay.moe.shapes import LayerShape
from titan_relay.private_torch import group_named


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

    @property
    def rank(self) -> int:
        return 0 if self.ring is None else self.ring.link.rank

    def owner(self, hop: int) -> int:
        """The rank whose experts or tokens this rank holds at ``hop``."""
        return (self.rank - hop) % self.num_ranks


@dataclass(frozen=True)
class Wants:
    """Which gradients somebody asks for; equal on all ranks."""

    x: bool
    scores: bool
    weights: bool


def find_ring(group_name: str) -> Ring | None:
    """The ring of a process group given by name; "" and groups of one have none."""
    if not group_name:
        return None
    group = group_named(group_name)
    return None if group.size() == 1 else relay_ring(group)


def layer_shape(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    weights: ExpertWeights,
    num_ranks: int,
    options: RelayOptions,
) -> LayerShape:
    return LayerShape(
        num_ranks=num_ranks,
        num_tokens=options.max_tokens_per_rank or x_TD.shape[0],
        dim=x_TD.shape[1],
        expert_dim=weights.w1_gFD.shape[1],
        num_experts=weights.num_experts * num_ranks,
        top_k=scores_TK.shape[1],
        dtype=x_TD.dtype,
        score_dtype=scores_TK.dtype,
        has_biases=weights.b1_gF is not None,
    )
