"""Forward of some consecutive experts over the rows routed to them: the boundary that layers call.

Rows, their segments and the weights of a group of experts in; a sum into the output's tokens out;
no allocation that grows with the routing. The workspace says which implementation computes.

Shape legend: T tokens, K top-k, N = T * K routed rows, D model dimension, F expert hidden
dimension, g experts held together.
"""

from collections.abc import Sequence

import torch

from relay_kernels.activation import SwiGLU
from relay_kernels.forward_fused import fused_forward_experts_
from relay_kernels.forward_step import Segment, step_forward_experts_
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace import ForwardWorkspace, StepShape
from relay_kernels.workspace_fused import FusedForwardWorkspace


def forward_workspace(shape: StepShape) -> ForwardWorkspace | FusedForwardWorkspace:
    """Scratch memory for ``forward_experts_``."""
    return FusedForwardWorkspace(shape) if shape.is_fused else ForwardWorkspace(shape)


def forward_workspace_bytes(shape: StepShape) -> int:
    """The bytes of ``forward_workspace(shape)``."""
    kind = FusedForwardWorkspace if shape.is_fused else ForwardWorkspace
    return kind.num_bytes(shape)


def forward_experts_(
    out_TD: torch.Tensor,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    rows_N: torch.Tensor,
    segments: Sequence[Segment],
    weights: ExpertWeights,
    activation: SwiGLU,
    workspace: ForwardWorkspace | FusedForwardWorkspace,
) -> None:
    """``out[t] += score * expert(x[t])`` for every row of the segments.

    Not differentiable (``backward_experts_`` is its backward): parameters need ``torch.no_grad``.

    Args:
        out_TD: summed into, in place.
        rows_N: integer row numbers ``t * K + k``, sorted by expert; an expert has a token once.
        segments: one per expert of ``weights``, in its order and adjoining; empty ones are
            ordinary.
        workspace: scratch, overwritten.
    """
    assert len(segments) == weights.num_experts > 0
    args = (out_TD, x_TD, scores_TK, rows_N, segments, weights, activation)
    if isinstance(workspace, FusedForwardWorkspace):
        fused_forward_experts_(*args, workspace)
    else:
        step_forward_experts_(*args, workspace)
