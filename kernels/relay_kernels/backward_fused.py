"""Backward of some consecutive experts over the rows routed to them, by the fused ops.

Shape legend: T tokens, K top-k, N = T * K routed rows, D model dimension, F expert hidden
dimension, g experts held together.
"""

from collections.abc import Sequence

import torch

from relay_kernels.activation import SwiGLU
from relay_kernels.forward_fused import chunks, device_offsets
from relay_kernels.forward_step import Segment
from relay_kernels.gradients import Gradients
from relay_kernels.ops_backward import (
    dx_rows_,
    dx_scatter_,
    hidden_backward_,
    weight_gradients_,
)
from relay_kernels.ops_forward import sum_rows_
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace_fused import FusedBackwardWorkspace


def fused_backward_experts_(
    gradients: Gradients,
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    rows_N: torch.Tensor,
    segments: Sequence[Segment],
    weights: ExpertWeights,
    activation: SwiGLU,
    workspace: FusedBackwardWorkspace,
) -> None:
    """``backward.backward_experts_`` by the fused ops; never waits for the device."""
    shape = workspace.shape
    scores_N, top_k = scores_TK.reshape(-1), scores_TK.shape[1]
    offsets_G = device_offsets(segments, x_TD.device)
    a_RF = workspace.a_RF if gradients.weights is not None else None
    dh1_RF, dh3_RF = workspace.dh1_RF, workspace.dh3_RF
    needs_hidden = gradients.dx_TD is not None or gradients.weights is not None
    hidden = (dh1_RF, dh3_RF, a_RF) if needs_hidden else (None, None, None)
    dscores_N = None if gradients.dscores_TK is None else gradients.dscores_TK.view(-1)
    how = (top_k, shape.rows_per_expert)
    for first, last in _chunks(gradients, segments, workspace.max_rows):
        where = (rows_N, offsets_G, first, last)
        hidden_backward_(
            *hidden,
            dscores_N,
            x_TD,
            dout_TD,
            scores_N,
            *where,
            *weights.arguments(),
            *how,
            activation.alpha,
            activation.limit,
            activation.up_offset,
            shape.kernels,
        )
        if gradients.weights is not None:
            assert a_RF is not None, "a workspace for weight gradients"
            weight_gradients_(
                *gradients.weights.arguments(),
                dh1_RF,
                dh3_RF,
                a_RF,
                x_TD,
                dout_TD,
                scores_N,
                *where,
                *how,
                gradients.accumulate_weights,
                shape.kernels,
            )
        if gradients.dx_TD is not None:
            operands = (dh1_RF, dh3_RF, *where, weights.w1_gFD, weights.w3_gFD, *how)
            _add_dx_(gradients.dx_TD, workspace, operands)


def _chunks(
    gradients: Gradients, segments: Sequence[Segment], max_rows: int
) -> list[tuple[int, int]]:
    """One without rows where there are none: weight gradients still become zeros."""
    found = list(chunks(segments, max_rows))
    start = segments[0][0]
    return found or ([(start, start)] if gradients.weights is not None else [])


def _add_dx_(dx_TD: torch.Tensor, workspace: FusedBackwardWorkspace, operands: tuple) -> None:
    kernels = workspace.shape.kernels
    if workspace.y_RD is None or workspace.positions_N is None:
        dx_scatter_(dx_TD, *operands, kernels)
        return
    y_RD, positions_N = workspace.y_RD, workspace.positions_N
    dx_rows_(y_RD, positions_N, *operands, kernels)
    _, _, *where, _, _, top_k, _ = operands
    sum_rows_(dx_TD, y_RD, positions_N, *where, top_k, kernels)
