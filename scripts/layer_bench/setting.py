"""One setting of the layer benchmark: shapes, dtype and routing, the same on every rank.

Shape legend: T tokens per rank, K top-k, D model dimension, F expert hidden dimension, E experts.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layer_check.dense_truth import DenseLayer, RankData
from titan_relay.commands.arguments import above_0, at_least_0, at_least_1

# Layer shapes as published: model dimension, expert hidden dimension, experts, top-k.
PRESETS = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "qwen2-57b-a14b": (3584, 2560, 64, 8),
    "phi-3.5-moe": (4096, 6400, 16, 2),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_layer_options(parser: argparse.ArgumentParser) -> None:
    """What a layer is, and how the relay cuts it; the caller sets defaults of the sizes."""
    parser.add_argument("--preset", choices=PRESETS, help="layer shape of a published model")
    parser.add_argument("--scale", type=above_0, default=1.0, help="shrink a preset's D and F")
    parser.add_argument("--tokens", type=at_least_1, help="tokens per rank")
    parser.add_argument("--dim", type=at_least_1, help="model dimension")
    parser.add_argument("--expert-dim", type=at_least_1, help="expert hidden dimension")
    parser.add_argument("--experts", type=at_least_1)
    parser.add_argument("--top-k", type=at_least_1)
    parser.add_argument("--skew", type=at_least_0, help="Zipf exponent; 0 is balanced")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--num-slices", type=at_least_1, help="of the relay; default auto")
    parser.add_argument("--rows-per-step", type=at_least_1, help="default auto")


def parse_layer(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with the sizes of a preset in the place of its name."""
    args = parser.parse_args(argv)
    if args.preset:
        dim, expert_dim, args.experts, args.top_k = PRESETS[args.preset]
        args.dim, args.expert_dim = round(dim * args.scale), round(expert_dim * args.scale)
    if args.top_k > args.experts:
        parser.error(f"--top-k {args.top_k} must be at most --experts {args.experts}")
    return args


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

    @staticmethod
    def of(args: argparse.Namespace, ep: int) -> "Setting":
        """From the options of a layer."""
        sizes = ("tokens", "dim", "expert_dim", "experts", "top_k", "skew", "device")
        values = {name: getattr(args, name) for name in sizes}
        return Setting(ep=ep, dtype=DTYPES[args.dtype], **values)

    def __str__(self) -> str:
        return (
            f"T={self.tokens} D={self.dim} F={self.expert_dim} E={self.experts} K={self.top_k} "
            f"{self.dtype} skew={self.skew} {self.device}"
        )

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
