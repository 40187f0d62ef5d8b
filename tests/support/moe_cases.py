"""Random Mixture-of-Experts layers and routings for tests, the same on every rank from one seed.

Shape legend: T tokens, K top-k, D model dimension, F expert hidden dimension, E experts.
"""

from dataclasses import dataclass

import torch

from layer_check.dense_truth import DenseLayer, Expected, RankData, expected_results
from relay_kernels import SwiGLU

PLAIN = SwiGLU()
# Besides these "even": every expert gets the same number of rows from every rank.
SKEWS = ("balanced", "zipf", "one_expert", "one_rank", "idle_rank", "rotating")


@dataclass(frozen=True)
class MoeCase:
    """One layer over ``num_ranks`` ranks."""

    num_ranks: int
    num_tokens: int = 13
    dim: int = 12
    expert_dim: int = 10
    num_experts: int = 12
    top_k: int = 2
    skew: str = "balanced"
    has_biases: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0
    tokens_by_rank: tuple[int, ...] | None = None

    def tokens_of(self, rank: int) -> int:
        return self.tokens_by_rank[rank] if self.tokens_by_rank else self.num_tokens

    def weights(self) -> list[torch.Tensor]:
        """w1, w2, w3 of all experts, and b1, b2, b3 with biases."""
        random = torch.Generator().manual_seed(self.seed)
        experts, dim, hidden = self.num_experts, self.dim, self.expert_dim
        shapes = [(experts, hidden, dim), (experts, dim, hidden), (experts, hidden, dim)]
        scales = [dim**-0.5, hidden**-0.5, dim**-0.5]
        if self.has_biases:
            shapes += [(experts, hidden), (experts, dim), (experts, hidden)]
            scales += [0.5, 0.5, 0.5]
        return [
            (torch.randn(shape, generator=random) * scale).to(self.dtype)
            for shape, scale in zip(shapes, scales, strict=True)
        ]

    def data(self, rank: int) -> RankData:
        """The inputs of one rank."""
        random = torch.Generator().manual_seed(1000 * self.seed + rank + 1)
        tokens = self.tokens_of(rank)
        # Routers score in float32 whatever the tokens are; only float64 goes further.
        scores = torch.rand(tokens, self.top_k, generator=random)
        scores = scores.to(torch.promote_types(torch.float32, self.dtype))
        return RankData(
            x_TD=torch.randn(tokens, self.dim, generator=random).to(self.dtype),
            scores_TK=scores / scores.sum(1, keepdim=True),
            ids_TK=self._ids(rank, tokens, random),
            dout_TD=torch.randn(tokens, self.dim, generator=random).to(self.dtype),
        )

    def expected(self, activation: SwiGLU = PLAIN) -> Expected:
        """The truth, of all ranks."""
        layer = DenseLayer(self.weights(), activation.alpha, activation.limit, activation.up_offset)
        return expected_results(layer, [self.data(rank) for rank in range(self.num_ranks)])

    def _ids(self, rank: int, tokens: int, random: torch.Generator) -> torch.Tensor:
        """Distinct ids per token: the top-k of random numbers plus the skew's preference."""
        experts = self.num_experts
        preference = torch.zeros(experts)
        per_rank = experts // self.num_ranks
        if self.skew == "even":
            ids = torch.arange(tokens * self.top_k) % experts
            return ids.view(tokens, self.top_k)
        if self.skew == "zipf":
            preference = -2.0 * torch.log(torch.arange(1, experts + 1).float())
        elif self.skew == "one_expert":
            preference[0] = 1e6
        elif self.skew == "one_rank":
            preference[:per_rank] = 1e6
        elif self.skew == "idle_rank":
            preference[-per_rank:] = -1e6
        elif self.skew == "rotating":
            preference[rank % experts] = 1e6
        gumbel = -torch.log(-torch.log(torch.rand(tokens, experts, generator=random)))
        return (gumbel + preference).topk(self.top_k, dim=1).indices
