"""Some consecutive experts over the rows routed to them: the boundary that layers call.

Rows, their segments and the weights of a group of experts in; sums into tokens out; no allocation
that grows with the routing. Nothing of the forward is kept: the backward rebuilds hidden
activations in steps of at most R rows, which are released before the next. The workspace says which
implementation computes: the fused Triton kernels, or steps in plain PyTorch.

Shape legend: T tokens, K top-k, D model dimension.
"""

import torch

from relay_kernels.activation import SwiGLU
from relay_kernels.rows import RoutedTokens
from relay_kernels.steps_backward import step_backward_experts_
from relay_kernels.steps_forward import step_forward_experts_
from relay_kernels.weights import ExpertWeights, Gradients
from relay_kernels.workspace import (
    BackwardWorkspace,
    ForwardWorkspace,
    FusedBackwardWorkspace,
    FusedForwardWorkspace,
    StepShape,
    workspace_bytes,
)


def forward_workspace(shape: StepShape) -> ForwardWorkspace | FusedForwardWorkspace:
    """Scratch memory for ``forward_experts_``."""
    return FusedForwardWorkspace(shape) if shape.is_fused else ForwardWorkspace(shape)


def forward_workspace_bytes(shape: StepShape) -> int:
    """The bytes of ``forward_workspace(shape)``."""
    kind = FusedForwardWorkspace if shape.is_fused else ForwardWorkspace
    return workspace_bytes(kind, shape)


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
    return workspace_bytes(kind, shape, grad_dtype)


def forward_experts_(
    out_TD: torch.Tensor,
    tokens: RoutedTokens,
    weights: ExpertWeights,
    activation: SwiGLU,
    workspace: ForwardWorkspace | FusedForwardWorkspace,
) -> None:
    """``out[t] += score * expert(x[t])`` for every row of the segments.

    Not differentiable (``backward_experts_`` is its backward): parameters need ``torch.no_grad``.

    Args:
        out_TD: summed into, in place; its last stride is 1.
        tokens: with one segment for each expert of ``weights``.
        workspace: scratch, overwritten.
    """
    assert len(tokens.segments) == weights.num_experts > 0
    if isinstance(workspace, FusedForwardWorkspace):
        from relay_kernels.fused import fused_forward_experts_

        fused_forward_experts_(out_TD, tokens, weights, activation, workspace)
    else:
        step_forward_experts_(out_TD, tokens, weights, activation, workspace)


def backward_experts_(
    gradients: Gradients,
    dout_TD: torch.Tensor,
    tokens: RoutedTokens,
    weights: ExpertWeights,
    activation: SwiGLU,
    workspace: BackwardWorkspace | FusedBackwardWorkspace,
) -> None:
    """Gradients of ``forward_experts_`` for the rows of the segments.

    Score gradients are written for these rows alone: each row belongs to one expert. Products that
    nobody asks for are not computed. Not differentiable: parameters need ``torch.no_grad``.
    """
    assert len(tokens.segments) == weights.num_experts > 0
    if isinstance(workspace, FusedBackwardWorkspace):
        from relay_kernels.fused import fused_backward_experts_

        fused_backward_experts_(gradients, dout_TD, tokens, weights, activation, workspace)
    else:
        step_backward_experts_(gradients, dout_TD, tokens, weights, activation, workspace)
