"""The scratch memory of one step, allocated once per call at its full size.

Its size depends on the number of rows per step alone, never on what the router does, so that the
peak of a layer is the same for every routing.

Products are computed in the tokens' dtype. Between two products the forward takes PyTorch's
operators as they are, which compute in float32 where that dtype is narrower and round every result.
The backward's chain of operators is longer: there, a block of rows is held in float32 until it is
rounded once; where the dtype is not narrower it works without copies.

The fused kernels need less: rows are gathered inside them, so there is no copy of tokens; and
products go into the activation in float32 without leaving the chip.

Shape legend: R rows per step, n rows of this step, N = T * K routed rows, D model dimension, F
expert hidden dimension.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from relay_kernels.choice import uses_triton
from relay_kernels.rows import RoutedTokens
from relay_kernels.weights import Gradients

# 256 KiB of float32: a core's second-level cache holds a backward's five such buffers.
_BLOCK_NUMEL = 65536
# Steps whose row numbers are worked out together.
_INDEX_STEPS = 8


@dataclass(frozen=True)
class StepShape:
    """What a step's scratch memory depends on, and which implementation computes it.

    Attributes:
        max_rows: rows of a step at most.
        kernels: "auto", "triton" or "torch"; see ``choice``.
        deterministic: sums have a fixed order, so that two runs give the same bits. PyTorch's
            always have; the fused kernels then keep a step's results, ``R * D`` elements, and
            4 bytes per routed row.
        num_rows: routed rows of the tokens at hand, ``T * K``.
        rows_per_expert: how many of them an expert has on average; tuning depends on it.
    """

    max_rows: int
    dim: int
    expert_dim: int
    dtype: torch.dtype
    device: torch.device
    kernels: str = "auto"
    deterministic: bool = False
    num_rows: int = 0
    rows_per_expert: int = 256

    def __post_init__(self) -> None:
        for name in ("max_rows", "dim", "expert_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"StepShape: {name} = {getattr(self, name)} must be at least 1")

    @property
    def is_fused(self) -> bool:
        """The fused Triton kernels compute, and not plain PyTorch."""
        return uses_triton(self.kernels, self.device, self.dtype)

    @property
    def math_dtype(self) -> torch.dtype:
        """The backward's dtype between products."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def is_narrow(self) -> bool:
        return self.math_dtype != self.dtype

    def rows(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.max_rows, width, dtype=dtype, device=self.device)


class HiddenBuffers:
    """A backward's ``num_wide`` buffers of R rows, and buffers of a block's rows for the math.

    What lies between products is done a block of rows at a time, so that it stays in the cache and
    needs little memory: in the products' own buffers where they have the math dtype (then only
    ``num_extra`` block buffers are needed), otherwise in copies of a block.
    """

    def __init__(self, shape: StepShape, num_wide: int, num_extra: int) -> None:
        self._wide = [shape.rows(shape.expert_dim, shape.dtype) for _ in range(num_wide)]
        size = (block_rows(shape), shape.expert_dim)
        self._copies = [
            torch.empty(size, dtype=shape.math_dtype, device=shape.device)
            for _ in range(num_wide if shape.is_narrow else 0)
        ]
        self._extra = [
            torch.empty(size, dtype=shape.math_dtype, device=shape.device) for _ in range(num_extra)
        ]
        self._block_rows = size[0]

    def wide(self, num_rows: int) -> list[torch.Tensor]:
        """The products' buffers."""
        return [buffer[:num_rows] for buffer in self._wide]

    def blocks(self, num_rows: int) -> Iterator[slice]:
        """The rows of each block."""
        for first in range(0, num_rows, self._block_rows):
            yield slice(first, min(first + self._block_rows, num_rows))

    def load(self, *values_nF: torch.Tensor) -> list[torch.Tensor]:
        """A block of the products' buffers, in order, in the math dtype."""
        if not self._copies:
            return list(values_nF)
        return [
            copy[: value.shape[0]].copy_(value)
            for copy, value in zip(self._copies, values_nF, strict=True)
        ]

    def extra(self, num_rows: int) -> list[torch.Tensor]:
        """Block buffers of the math dtype."""
        return [buffer[:num_rows] for buffer in self._extra]


def block_rows(shape: StepShape) -> int:
    """Rows between products at a time: few enough for the cache, many against a call's cost."""
    return max(1, min(shape.max_rows, _BLOCK_NUMEL // shape.expert_dim))


class RowIndex:
    """Token numbers (int64) and scores of many steps' rows at a time.

    Steps are short, and a call of an operator costs as much as its work on so few numbers.
    """

    def __init__(self, shape: StepShape, score_dtype: torch.dtype) -> None:
        size = _INDEX_STEPS * shape.max_rows
        self._token_I = torch.empty(size, dtype=torch.int64, device=shape.device)
        self._score_I = torch.empty(size, dtype=score_dtype, device=shape.device)
        self._first = self._last = 0

    def begin(self, tokens: RoutedTokens) -> None:
        """Other tokens' rows from now on."""
        self._tokens, self._end = tokens, tokens.bounds[1]
        self._first = self._last = 0

    def of(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and scores ``(n, 1)`` of the sorted rows ``first <= i < last``.

        Example: with ``top_k = 2`` the rows ``[5, 0]`` are choice 1 of token 2 and choice 0 of
        token 0, so tokens are ``[2, 0]`` and scores ``[scores_TK[2, 1], scores_TK[0, 0]]``.
        """
        if first < self._first or last > self._last:
            self._load(first)
        rows = slice(first - self._first, last - self._first)
        return self._token_I[rows], self._score_I[rows].unsqueeze(1)

    def _load(self, first: int) -> None:
        last = min(first + self._token_I.shape[0], self._end)
        num_rows = last - first
        row_i, scores_N = self._tokens.rows_N[first:last], self._tokens.scores_N
        torch.div(row_i, self._tokens.top_k, rounding_mode="floor", out=self._token_I[:num_rows])
        score_i = self._score_I[:num_rows]
        if scores_N.dtype == score_i.dtype:
            torch.index_select(scores_N, 0, row_i, out=score_i)
        else:
            score_i.copy_(torch.index_select(scores_N, 0, row_i))
        self._first, self._last = first, last


class ForwardWorkspace:
    """``R * (D + 2F)`` elements and the row index."""

    def __init__(self, shape: StepShape) -> None:
        self.max_rows = shape.max_rows
        self.index = RowIndex(shape, shape.dtype)
        self.x_RD = shape.rows(shape.dim, shape.dtype)
        self.h1_RF = shape.rows(shape.expert_dim, shape.dtype)
        self.h3_RF = shape.rows(shape.expert_dim, shape.dtype)


class BackwardWorkspace:
    """``R * (2D + 3F)`` elements, the row index, and blocks: 2 and for a narrow dtype 3 more.

    Two masks of a block say what a clamped activation cuts off.

    Where gradients are summed in another dtype than the products' (bfloat16 into float32), one
    step's product is held before it is added, ``D * F`` elements.
    """

    def __init__(self, shape: StepShape, grad_dtype: torch.dtype | None) -> None:
        self.max_rows = shape.max_rows
        self.index = RowIndex(shape, shape.math_dtype)
        self.row_R = torch.empty(shape.max_rows, dtype=torch.int64, device=shape.device)
        self.x_RD = shape.rows(shape.dim, shape.dtype)
        self.g_RD = shape.rows(shape.dim, shape.dtype)
        self.hidden = HiddenBuffers(shape, num_wide=3, num_extra=2)
        dtype, device = shape.math_dtype, shape.device
        size = (2, block_rows(shape), shape.expert_dim)
        self.cut_2BF = torch.empty(size, dtype=torch.bool, device=device)
        self.dscore_R = torch.empty(shape.max_rows, dtype=dtype, device=device)
        self.ones_F = torch.ones(shape.expert_dim, dtype=dtype, device=device)
        self.product: torch.Tensor | None = None
        if grad_dtype not in (None, shape.dtype):
            numel = shape.dim * shape.expert_dim
            self.product = torch.empty(numel, dtype=shape.dtype, device=shape.device)


@dataclass(frozen=True)
class OrderedSum:
    """A step's results by row, and where each row's is (int32): for sums in a fixed order."""

    y_RD: torch.Tensor
    positions_N: torch.Tensor

    @staticmethod
    def of(shape: StepShape) -> "OrderedSum | None":
        """None where sums have any order."""
        if not shape.deterministic:
            return None
        positions_N = torch.empty(shape.num_rows, dtype=torch.int32, device=shape.device)
        return OrderedSum(shape.rows(shape.dim, shape.dtype), positions_N)


@dataclass(frozen=True)
class HiddenGradients:
    """A step's hidden gradients, and activations scaled by the score; of equal strides.

    ``dh1_RF`` and ``dh3_RF`` are both given or both None. What is None is not computed.
    """

    dh1_RF: torch.Tensor | None
    dh3_RF: torch.Tensor | None
    a_RF: torch.Tensor | None


class FusedForwardWorkspace:
    """``R * F`` elements; a deterministic sum has ``R * D`` more, and ``N`` positions (int32)."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.a_RF = shape.rows(shape.expert_dim, shape.dtype)
        self.ordered = OrderedSum.of(shape)


class FusedBackwardWorkspace:
    """``R * 3F`` elements, ``R * 2F`` without weight gradients; and the deterministic sum's.

    While score gradients are computed, 4 bytes more are taken per row and column tile of F.
    """

    def __init__(self, shape: StepShape, grad_dtype: torch.dtype | None) -> None:
        self.shape = shape
        self.hidden = HiddenGradients(
            shape.rows(shape.expert_dim, shape.dtype),
            shape.rows(shape.expert_dim, shape.dtype),
            None if grad_dtype is None else shape.rows(shape.expert_dim, shape.dtype),
        )
        self.ordered = OrderedSum.of(shape)

    def hidden_for(self, gradients: Gradients) -> HiddenGradients:
        """The buffers that ``gradients`` are made from."""
        if gradients.weights is not None:
            assert self.hidden.a_RF is not None, "a workspace for weight gradients"
            return self.hidden
        if gradients.dx_TD is not None:
            return HiddenGradients(self.hidden.dh1_RF, self.hidden.dh3_RF, None)
        return HiddenGradients(None, None, None)


def workspace_bytes(kind: Callable[..., object], shape: StepShape, *arguments: Any) -> int:
    """The bytes of ``kind(shape, *arguments)``, by making it without memory."""
    return _num_bytes(kind(replace(shape, device=torch.device("meta")), *arguments))


def _num_bytes(part: object) -> int:
    if isinstance(part, torch.Tensor):
        return part.nbytes
    parts = part if isinstance(part, list) else getattr(part, "__dict__", {}).values()
    return sum(map(_num_bytes, parts))
