"""One setting of the layer benchmark: shapes, dtype and routing, the same on every rank.

Shape legend: T tokens per rank, K top-k, D model dimension, F expert hidden dimension, E experts.
"""

from dataclasses import dataclass

import torch

from layer_check.dense_truth import DenseLayer, RankData

# Layer shapes as published: model dimension, expert hidden dimension, experts, top-k.
PRESETS = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "qwen2-57b-a14b": (3584, 2560, 64, 8),
    "phi-3.5-moe": (4096, 6400, 16, 2),
}


@dataclass(frozen=True)
class Setting:
    """Everything that an implementation and its inputs depend on."""

    ep: int
    tokens: int
    dim: int
    expert_dim: int
    experts: int
    top_k: int
    dtype: torch.dtype
    skew: float
    device: str
    seed: int = 0

    @property
    def local_experts(self) -> int:
        return self.experts // self.ep

    @property
    def unit_bytes(self) -> int:
        """One copy of a rank's tokens."""
        return self.tokens * self.dim * self.dtype.itemsize

    def weights(self, rank: int) -> list[torch.Tensor]:
        """w1_eFD, w2_eDF, w3_eFD of a rank."""
        shapes = [(self.expert_dim, self.dim), (self.dim, self.expert_dim)]
        shapes.append(shapes[0])
        return [
            torch.stack(
                [
                    self._normal((index, rank * self.local_experts + expert), shape)
                    for expert in range(self.local_experts)
                ]
            )
            .mul_(shape[1] ** -0.5)
            .to(self.device, self.dtype)
            for index, shape in enumerate(shapes)
        ]

    def dense_layer(self) -> DenseLayer:
        """All ranks' experts."""
        by_rank = [self.weights(rank) for rank in range(self.ep)]
        return DenseLayer([torch.cat(shares) for shares in zip(*by_rank, strict=True)])

    def inputs(self, rank: int) -> RankData:
        """A rank's tokens, their routing, and the gradient of their output.

        With Zipf exponent A an expert's popularity is ``rank ** -A``; each token draws K distinct
        experts (Gumbel top-k). A = 0 deals experts out evenly.
        """
        tokens, top_k, experts = self.tokens, self.top_k, self.experts
        if self.skew == 0.0:
            ids_TK = torch.arange(tokens * top_k).view(tokens, top_k) % experts
        else:
            popularity = -self.skew * torch.log(torch.arange(1, experts + 1).float())
            uniform = torch.rand(tokens, experts, generator=self._random((10, rank)))
            ids_TK = (popularity - torch.log(-torch.log(uniform))).topk(top_k, dim=1).indices
        scores_TK = torch.rand(tokens, top_k, generator=self._random((11, rank)))
        return RankData(
            self._normal((12, rank), (tokens, self.dim)).to(self.device, self.dtype),
            (scores_TK / scores_TK.sum(1, keepdim=True)).to(self.device),
            ids_TK.to(self.device),
            self._normal((13, rank), (tokens, self.dim)).to(self.device, self.dtype),
        )

    def _random(self, key: tuple[int, int]) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + key[0] * 10_007 + key[1])

    def _normal(self, key: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self._random(key))
