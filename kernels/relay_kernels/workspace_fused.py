"""The scratch memory of the fused kernels' steps, allocated once per call at its full size.

Rows are gathered inside the kernels, so there is no copy of tokens; and products go into the
activation in float32 without leaving the chip.

Shape legend: R rows per step, N = T * K routed rows, D model dimension, F expert hidden dimension.
"""

import torch

from relay_kernels.workspace import StepShape

_POSITION_BYTES = 4


class FusedForwardWorkspace:
    """``R * F`` elements; a deterministic sum has ``R * D`` more, and ``N`` positions (int32)."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.max_rows = shape.max_rows
        self.a_RF = shape.rows(shape.expert_dim, shape.dtype)
        self.y_RD, self.positions_N = _ordered_sum(shape)

    @classmethod
    def num_bytes(cls, shape: StepShape) -> int:
        num_bytes = shape.max_rows * shape.expert_dim * shape.dtype.itemsize
        return num_bytes + _ordered_sum_bytes(shape)


class FusedBackwardWorkspace:
    """``R * 3F`` elements, ``R * 2F`` without weight gradients; and the deterministic sum's.

    While score gradients are computed, the op takes 4 bytes more per row and column tile of F.
    """

    def __init__(self, shape: StepShape, grad_dtype: torch.dtype | None) -> None:
        self.shape = shape
        self.max_rows = shape.max_rows
        self.dh1_RF = shape.rows(shape.expert_dim, shape.dtype)
        self.dh3_RF = shape.rows(shape.expert_dim, shape.dtype)
        self.a_RF: torch.Tensor | None = None
        if grad_dtype is not None:
            self.a_RF = shape.rows(shape.expert_dim, shape.dtype)
        self.y_RD, self.positions_N = _ordered_sum(shape)

    @classmethod
    def num_bytes(cls, shape: StepShape, grad_dtype: torch.dtype | None) -> int:
        num_hidden = 2 if grad_dtype is None else 3
        num_bytes = shape.max_rows * num_hidden * shape.expert_dim * shape.dtype.itemsize
        return num_bytes + _ordered_sum_bytes(shape)


def _ordered_sum(shape: StepShape) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A step's results by row, and where each row's is; None where sums have any order."""
    if not shape.deterministic:
        return None, None
    positions_N = torch.empty(shape.num_rows, dtype=torch.int32, device=shape.device)
    return shape.rows(shape.dim, shape.dtype), positions_N


def _ordered_sum_bytes(shape: StepShape) -> int:
    if not shape.deterministic:
        return 0
    return shape.max_rows * shape.dim * shape.dtype.itemsize + shape.num_rows * _POSITION_BYTES
