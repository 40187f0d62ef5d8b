"""Layers for whose shapes kernels are compiled without a device: tensors without memory.

Shape legend: T tokens, K top-k, N = T * K routed rows, R rows of a chunk, D model dimension, F
expert hidden dimension, g experts.
"""

from dataclasses import dataclass

import torch

from relay_kernels import ExpertWeights, RoutedTokens, SwiGLU
from relay_kernels.rows import Chunk
from relay_kernels.workspace import HiddenGradients, OrderedSum

_CHUNK_ROWS = 4096


@dataclass(frozen=True)
class ExampleLayer:
    """Shapes of one layer on one rank that holds all its experts."""

    name: str
    dim: int
    expert_dim: int
    num_experts: int
    top_k: int
    num_tokens: int = 16384
    has_biases: bool = False
    is_clamped: bool = False

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.top_k

    def activation(self) -> SwiGLU:
        return SwiGLU(1.702, 7.0, 1.0) if self.is_clamped else SwiGLU()

    @property
    def rows_per_expert(self) -> int:
        return self.num_rows // self.num_experts

    def chunk(self, dtype: torch.dtype) -> Chunk:
        tokens = RoutedTokens(
            _meta((self.num_tokens, self.dim), dtype),
            _meta((self.num_tokens, self.top_k), torch.float32),
            _meta((self.num_rows,), torch.int32),
            segments=(),  # kernels know them by the offsets
        )
        offsets_G = _meta((self.num_experts + 1,), torch.int32)
        return Chunk(tokens, offsets_G, 0, min(_CHUNK_ROWS, self.num_rows), self.rows_per_expert)

    def hidden(self, dtype: torch.dtype) -> HiddenGradients:
        return HiddenGradients(*(_meta((_CHUNK_ROWS, self.expert_dim), dtype) for _ in range(3)))

    def ordered(self, dtype: torch.dtype) -> OrderedSum:
        y_RD = _meta((_CHUNK_ROWS, self.dim), dtype)
        return OrderedSum(y_RD, _meta((self.num_rows,), torch.int32))

    def weights(self, dtype: torch.dtype) -> ExpertWeights:
        """The experts, or their gradients."""
        experts, dim, hidden = self.num_experts, self.dim, self.expert_dim
        shapes: list[tuple[int, ...]] = [(experts, hidden, dim), (experts, dim, hidden)]
        shapes += [(experts, hidden, dim)]
        if self.has_biases:
            shapes += [(experts, hidden), (experts, dim), (experts, hidden)]
        return ExpertWeights(*[_meta(shape, dtype) for shape in shapes])


# One per shape class and feature: many narrow experts, few wide ones, few rows each, biases with
# the clamped activation, and sizes that no tile and no vector load divides.
EXAMPLE_LAYERS = (
    ExampleLayer("narrow", 2048, 768, 128, 8),
    ExampleLayer("wide", 4096, 14336, 8, 2),
    ExampleLayer("few_rows", 2048, 768, 128, 8, num_tokens=512),
    ExampleLayer("biases", 2880, 2880, 32, 4, has_biases=True, is_clamped=True),
    ExampleLayer("odd", 1001, 999, 7, 3),
)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
