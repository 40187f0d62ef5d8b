"""Backward of some consecutive experts over the rows routed to them: the boundary that layers call.

Nothing of the forward is kept: hidden activations are rebuilt in steps of at most R rows, which are
released before the next. The workspace says which implementation computes.

Shape legend: T tokens, K top-k, N = T * K routed rows, D model dimension, F expert hidden
dimension, g experts held together.
"""

from collections.abc import Sequence

import torch

from relay_kernels.activation import SwiGLU
from relay_kernels.backward_fused import fused_backward_experts_
from relay_kernels.backward_step import step_backward_experts_
from relay_kernels.forward_step import Segment
from relay_kernels.gradients import Gradients
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace import BackwardWorkspace, StepShape
from relay_kernels.workspace_fused import FusedBackwardWorkspace


def backward_workspace(
    shape: StepShape, grad_dtype: torch.dtype | None
) -> BackwardWorkspace | FusedBackwardWorkspace:
    """Scratch memory for ``backward_experts_``.

    Args:
        grad_dtype: in which weight gradients are summed; None when nobody asks for them.
    """
    kind = FusedBackwardWorkspace if shape.is_fused else BackwardWorkspace
    return kind(shape, grad_dtype)


def backward_workspace_bytes(shape: StepShape, grad_dtype: torch.dtype | None) -> int:
    """The bytes of ``backward_workspace(shape, grad_dtype)``."""
    kind = FusedBackwardWorkspace if shape.is_fused else BackwardWorkspace
    return kind.num_bytes(shape, grad_dtype)


def backward_experts_(
    gradients: Gradients,
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    rows_N: torch.Tensor,
    segments: Sequence[Segment],
    weights: ExpertWeights,
    activation: SwiGLU,
    workspace: BackwardWorkspace | FusedBackwardWorkspace,
) -> None:
    """Gradients of ``forward_experts_`` for the rows of the segments.

    Score gradients are written for these rows alone: each row belongs to one expert. Products that
    nobody asks for are not computed. Not differentiable: parameters need ``torch.no_grad``.
    """
    assert len(segments) == weights.num_experts > 0
    args = (gradients, dout_TD, x_TD, scores_TK, rows_N, segments, weights, activation)
    if isinstance(workspace, FusedBackwardWorkspace):
        fused_backward_experts_(*args, workspace)
    else:
        step_backward_experts_(*args, workspace)
