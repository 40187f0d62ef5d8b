"""The scratch memory of one step, allocated once per call at its full size.

Its size depends on the number of rows per step alone, never on what the router does, so that the
peak of a layer is the same for every routing.

Shape legend: R rows per step, D model dimension, F expert hidden dimension.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepShape:
    """What a step's scratch memory depends on."""

    max_rows: int
    dim: int
    expert_dim: int
    dtype: torch.dtype
    device: torch.device


class ForwardWorkspace:
    """``R * (2D + 2F)`` elements, and a token index, a row index and a score per row."""

    def __init__(self, shape: StepShape) -> None:
        rows = shape.max_rows
        self.max_rows = rows
        self.index = RowIndex(shape)
        self.x_RD = _empty(shape, shape.dim)
        self.y_RD = _empty(shape, shape.dim)
        self.h1_RF = _empty(shape, shape.expert_dim)
        self.h3_RF = _empty(shape, shape.expert_dim)

    @staticmethod
    def num_bytes(shape: StepShape) -> int:
        elements = shape.max_rows * (2 * shape.dim + 2 * shape.expert_dim)
        return elements * shape.dtype.itemsize + RowIndex.num_bytes(shape)


class BackwardWorkspace:
    """``R * (2D + 5F)`` elements, and a token index, a score and a score gradient per row.

    Where gradients are summed in another dtype than the computation's (bfloat16 into float32), one
    step's operands of the weight gradients, ``R * (2D + 3F)``, are held in that dtype as well.
    """

    def __init__(self, shape: StepShape, grad_dtype: torch.dtype | None) -> None:
        self.max_rows = shape.max_rows
        self.index = RowIndex(shape)
        self.x_RD = _empty(shape, shape.dim)
        self.g_RD = _empty(shape, shape.dim)
        self.h1_RF, self.h3_RF, self.u_RF, self.gate_RF, self.a_RF = (
            _empty(shape, shape.expert_dim) for _ in range(5)
        )
        self.dscore_R = torch.empty(shape.max_rows, dtype=shape.dtype, device=shape.device)
        self.ones_F = torch.ones(shape.expert_dim, dtype=shape.dtype, device=shape.device)
        self.wide: dict[str, torch.Tensor] = {}
        if grad_dtype is not None and grad_dtype != shape.dtype:
            widths = {"x": shape.dim, "g": shape.dim}
            widths |= dict.fromkeys(("a", "dh1", "dh3"), shape.expert_dim)
            self.wide = {
                name: torch.empty(shape.max_rows, width, dtype=grad_dtype, device=shape.device)
                for name, width in widths.items()
            }

    def widened(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in the dtype in which gradients are summed."""
        if not self.wide:
            return tensor
        return self.wide[name][: tensor.shape[0]].copy_(tensor)

    @staticmethod
    def num_bytes(shape: StepShape, grad_dtype: torch.dtype | None) -> int:
        rows, dim, expert_dim = shape.max_rows, shape.dim, shape.expert_dim
        elements = rows * (2 * dim + 5 * expert_dim + 1) + expert_dim
        total = elements * shape.dtype.itemsize + RowIndex.num_bytes(shape)
        if grad_dtype is not None and grad_dtype != shape.dtype:
            total += rows * (2 * dim + 3 * expert_dim) * grad_dtype.itemsize
        return total


class RowIndex:
    """For the rows of one step: row and token numbers (int64), scores in the compute dtype."""

    def __init__(self, shape: StepShape) -> None:
        self.row_R, self.token_R = torch.empty(
            2, shape.max_rows, dtype=torch.int64, device=shape.device
        ).unbind(0)
        self.score_R = torch.empty(shape.max_rows, dtype=shape.dtype, device=shape.device)

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
        return shape.max_rows * (16 + shape.dtype.itemsize)


def _empty(shape: StepShape, width: int) -> torch.Tensor:
    return torch.empty(shape.max_rows, width, dtype=shape.dtype, device=shape.device)
