"""The scratch memory of one step, allocated once per call at its full size.

Its size depends on the number of rows per step alone, never on what the router does, so that the
peak of a layer is the same for every routing.

Products are computed in the tokens' dtype. What lies between two products (activation, scores) is
computed in float32 when that dtype is narrower, so that a value is rounded once between two
products and not at every elementary operation; otherwise in the dtype itself, without copies.

Shape legend: R rows per step, n rows of this step, D model dimension, F expert hidden dimension.
"""

from dataclasses import dataclass

import torch

from relay_kernels.choice import uses_triton


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

    @property
    def is_fused(self) -> bool:
        """The fused Triton kernels compute, and not plain PyTorch."""
        return uses_triton(self.kernels, self.device, self.dtype)

    @property
    def math_dtype(self) -> torch.dtype:
        """The dtype between products."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def is_narrow(self) -> bool:
        return self.math_dtype != self.dtype

    def rows(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.max_rows, width, dtype=dtype, device=self.device)


class HiddenBuffers:
    """``num_math`` buffers of width F between products, and for a narrow dtype ``num_narrow`` more.

    Of the narrow ones the first takes a product's result, and each holds an operand of the next.
    """

    def __init__(self, shape: StepShape, num_math: int, num_narrow: int) -> None:
        self._math = [shape.rows(shape.expert_dim, shape.math_dtype) for _ in range(num_math)]
        self._narrow: list[torch.Tensor] = []
        if shape.is_narrow:
            self._narrow = [shape.rows(shape.expert_dim, shape.dtype) for _ in range(num_narrow)]

    def math(self, num_rows: int) -> list[torch.Tensor]:
        return [buffer[:num_rows] for buffer in self._math]

    def product(
        self,
        left_nA: torch.Tensor,
        right_AF: torch.Tensor,
        bias_F: torch.Tensor | None,
        out_nF: torch.Tensor,
    ) -> torch.Tensor:
        """``out = left right + bias`` with ``out`` in the math dtype."""
        result_nF = self._narrow[0][: out_nF.shape[0]] if self._narrow else out_nF
        if bias_F is None:
            torch.mm(left_nA, right_AF, out=result_nF)
        else:
            torch.addmm(bias_F, left_nA, right_AF, out=result_nF)
        return out_nF if result_nF is out_nF else out_nF.copy_(result_nF)

    def operand(self, index: int, value_nF: torch.Tensor) -> torch.Tensor:
        """``value`` in the products' dtype; ``index`` says in which narrow buffer it may lie."""
        if not self._narrow:
            return value_nF
        return self._narrow[index][: value_nF.shape[0]].copy_(value_nF)

    @staticmethod
    def num_bytes(shape: StepShape, num_math: int, num_narrow: int) -> int:
        row_bytes = num_math * shape.math_dtype.itemsize
        if shape.is_narrow:
            row_bytes += num_narrow * shape.dtype.itemsize
        return shape.max_rows * shape.expert_dim * row_bytes


class RowIndex:
    """For the rows of one step: row and token numbers (int64), scores in the math dtype."""

    def __init__(self, shape: StepShape) -> None:
        self.row_R, self.token_R = torch.empty(
            2, shape.max_rows, dtype=torch.int64, device=shape.device
        ).unbind(0)
        self.score_R = torch.empty(shape.max_rows, dtype=shape.math_dtype, device=shape.device)

    def load(
        self, rows_n: torch.Tensor, scores_N: torch.Tensor, top_k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row numbers, tokens and scores ``(n, 1)`` of the given rows.

        Example: with ``top_k = 2`` the rows ``[5, 0]`` are choice 1 of token 2 and choice 0 of
        token 0, so tokens are ``[2, 0]`` and scores ``[scores_TK[2, 1], scores_TK[0, 0]]``.
        """
        num_rows = rows_n.shape[0]
        row_n = self.row_R[:num_rows].copy_(rows_n)
        token_n = torch.div(row_n, top_k, rounding_mode="floor", out=self.token_R[:num_rows])
        score_n = self.score_R[:num_rows]
        if scores_N.dtype == score_n.dtype:
            torch.index_select(scores_N, 0, row_n, out=score_n)
        else:
            score_n.copy_(torch.index_select(scores_N, 0, row_n))
        return row_n, token_n, score_n.unsqueeze(1)

    @staticmethod
    def num_bytes(shape: StepShape) -> int:
        return shape.max_rows * (16 + shape.math_dtype.itemsize)


class ForwardWorkspace:
    """``R * (2D + 2F)`` elements and the row index."""

    NUM_MATH, NUM_NARROW = 2, 1

    def __init__(self, shape: StepShape) -> None:
        self.max_rows = shape.max_rows
        self.index = RowIndex(shape)
        self.x_RD = shape.rows(shape.dim, shape.dtype)
        self.y_RD = shape.rows(shape.dim, shape.dtype)
        self.hidden = HiddenBuffers(shape, self.NUM_MATH, self.NUM_NARROW)

    @classmethod
    def num_bytes(cls, shape: StepShape) -> int:
        return (
            shape.max_rows * 2 * shape.dim * shape.dtype.itemsize
            + HiddenBuffers.num_bytes(shape, cls.NUM_MATH, cls.NUM_NARROW)
            + RowIndex.num_bytes(shape)
        )


class BackwardWorkspace:
    """``R * (2D + 5F)`` elements, the row index and a score gradient per row.

    Where gradients are summed in another dtype than the products' (bfloat16 into float32), one
    step's product is held before it is added, ``D * F`` elements.
    """

    NUM_MATH, NUM_NARROW = 5, 3

    def __init__(self, shape: StepShape, grad_dtype: torch.dtype | None) -> None:
        self.max_rows = shape.max_rows
        self.index = RowIndex(shape)
        self.x_RD = shape.rows(shape.dim, shape.dtype)
        self.g_RD = shape.rows(shape.dim, shape.dtype)
        self.hidden = HiddenBuffers(shape, self.NUM_MATH, self.NUM_NARROW)
        dtype, device = shape.math_dtype, shape.device
        self.dscore_R = torch.empty(shape.max_rows, dtype=dtype, device=device)
        self.ones_F = torch.ones(shape.expert_dim, dtype=dtype, device=device)
        self.product: torch.Tensor | None = None
        if grad_dtype not in (None, shape.dtype):
            numel = shape.dim * shape.expert_dim
            self.product = torch.empty(numel, dtype=shape.dtype, device=shape.device)

    @classmethod
    def num_bytes(cls, shape: StepShape, grad_dtype: torch.dtype | None) -> int:
        total = shape.max_rows * 2 * shape.dim * shape.dtype.itemsize
        total += HiddenBuffers.num_bytes(shape, cls.NUM_MATH, cls.NUM_NARROW)
        total += (shape.max_rows + shape.expert_dim) * shape.math_dtype.itemsize
        total += RowIndex.num_bytes(shape)
        if grad_dtype not in (None, shape.dtype):
            total += shape.dim * shape.expert_dim * shape.dtype.itemsize
        return total
