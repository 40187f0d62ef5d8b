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
        self.y_RD: torch.Tensor | None = None
        self.positions_N: torch.Tensor | None = None
        if shape.deterministic:
            self.y_RD = shape.rows(shape.dim, shape.dtype)
            self.positions_N = torch.empty(shape.num_rows, dtype=torch.int32, device=shape.device)

    @classmethod
    def num_bytes(cls, shape: StepShape) -> int:
        num_bytes = shape.max_rows * shape.expert_dim * shape.dtype.itemsize
        if shape.deterministic:
            num_bytes += shape.max_rows * shape.dim * shape.dtype.itemsize
            num_bytes += shape.num_rows * _POSITION_BYTES
        return num_bytes
