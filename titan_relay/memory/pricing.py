"""What the all-to-all makes of a layer's tokens, in bytes, from shapes.

Expert parallelism trades rows between ranks and removes none: a rank that sends `top_k` rows per
token receives as many when the router is balanced, at any number of ranks. What bounds the worst
router is that a token has no more than one row per expert.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoutedLayer:
    """One mixture-of-experts layer on one rank.

    num_tokens: tokens of this rank. num_ranks: of expert parallelism. itemsize: bytes per element.
    """

    num_tokens: int
    top_k: int
    dim: int
    expert_dim: int
    num_experts: int
    num_ranks: int
    itemsize: int

    @property
    def balanced_rows(self) -> int:
        """Rows that reach this rank's experts from a balanced router."""
        return self.num_tokens * self.top_k

    @property
    def worst_rows(self) -> int:
        """Rows that reach them if all ranks' tokens choose this rank's experts first."""
        num_local = self.num_experts // self.num_ranks
        return self.num_ranks * self.num_tokens * min(self.top_k, num_local)

    def dispatched_bytes(self, num_rows: int) -> int:
        """The rows themselves, as the experts' input."""
        return num_rows * self.dim * self.itemsize

    def intermediate_bytes(self, num_rows: int) -> int:
        """Both up-projections of SwiGLU and their product."""
        return 3 * num_rows * self.expert_dim * self.itemsize
