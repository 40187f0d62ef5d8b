"""One layer's experts and the rows routed to them, all on one device.

Shape legend: T tokens, K top-k, N = T * K routed rows, D model dimension, F expert hidden
dimension, E experts.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch

from relay_kernels import ExpertWeights, RoutedTokens
from relay_kernels.rows import Chunk


@dataclass(frozen=True)
class Problem:
    """A layer's forward and backward on one rank that holds all its experts.

    ``offsets_G`` are the E + 1 bounds of the experts' rows, on the device.
    """

    name: str
    tokens: RoutedTokens
    dout_TD: torch.Tensor
    offsets_G: torch.Tensor
    weights: ExpertWeights

    @cached_property
    def token_N(self) -> torch.Tensor:
        """The token of each row."""
        return self.tokens.rows_N.long() // self.tokens.top_k

    @property
    def x_TD(self) -> torch.Tensor:
        return self.tokens.x_TD

    @property
    def num_rows(self) -> int:
        return self.tokens.rows_N.shape[0]

    @property
    def rows_per_expert(self) -> int:
        return self.num_rows // self.weights.num_experts

    @property
    def chunk(self) -> Chunk:
        """All rows at once."""
        return Chunk(self.tokens, self.offsets_G, 0, self.num_rows, self.rows_per_expert)

    @property
    def product_flops(self) -> int:
        """One of an expert's products over all rows: N x D x F multiply-adds."""
        _, expert_dim, dim = self.weights.w1_gFD.shape
        return 2 * self.num_rows * expert_dim * dim

    @property
    def description(self) -> str:
        num_experts, expert_dim, dim = self.weights.w1_gFD.shape
        return (
            f"{self.name}: T={self.x_TD.shape[0]} D={dim} F={expert_dim} E={num_experts} "
            f"K={self.tokens.top_k}"
        )


def make_problem(
    name: str,
    shape: tuple[int, int, int, int],
    num_tokens: int,
    skew: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Problem:
    """``shape`` is D, F, E, K. Experts are drawn by popularity ``rank ** -skew`` (0: uniform)."""
    dim, expert_dim, num_experts, top_k = shape
    random = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(sizes, generator=random, device=device, dtype=dtype)
        return values.mul_(scale)

    popularity = -skew * torch.arange(1, num_experts + 1, device=device).float().log()
    uniform = torch.rand(num_tokens, num_experts, generator=random, device=device)
    ids_TK = (popularity - (-uniform.log()).log()).topk(top_k, dim=1).indices
    scores_TK = torch.rand(num_tokens, top_k, generator=random, device=device)
    sorted_N, rows_N = ids_TK.reshape(-1).sort(stable=True)
    edges = torch.arange(num_experts + 1, device=device)
    offsets_G = torch.searchsorted(sorted_N, edges).to(torch.int32)
    weights = ExpertWeights(
        normal(num_experts, expert_dim, dim, scale=dim**-0.5),
        normal(num_experts, dim, expert_dim, scale=expert_dim**-0.5),
        normal(num_experts, expert_dim, dim, scale=dim**-0.5),
    )
    return Problem(
        name,
        RoutedTokens(
            normal(num_tokens, dim),
            scores_TK / scores_TK.sum(1, keepdim=True),
            rows_N.to(torch.int32),
            list(itertools.pairwise(offsets_G.tolist())),
        ),
        normal(num_tokens, dim),
        offsets_G,
        weights,
    )
