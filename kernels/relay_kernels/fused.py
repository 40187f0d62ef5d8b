"""Some consecutive experts over the rows routed to them, by the Triton kernels.

A chunk of rows at a time, in a few launches that never wait for the device. Imports triton, so that
nothing imports it before it is known to be needed.

Shape legend: T tokens, R rows of a chunk, D model dimension, F expert hidden dimension.
"""

import torch

from relay_kernels.activation import SwiGLU
from relay_kernels.rows import RoutedTokens, chunks
from relay_kernels.triton.launch_backward import dx, hidden_backward, weight_gradients
from relay_kernels.triton.launch_forward import down, up_gate
from relay_kernels.weights import ExpertWeights, Gradients
from relay_kernels.workspace import FusedBackwardWorkspace, FusedForwardWorkspace


def fused_forward_experts_(
    out_TD: torch.Tensor,
    tokens: RoutedTokens,
    weights: ExpertWeights,
    activation: SwiGLU,
    workspace: FusedForwardWorkspace,
) -> None:
    """``experts.forward_experts_`` by the kernels."""
    shape, a_RF = workspace.shape, workspace.a_RF
    for chunk in chunks(tokens, shape.max_rows, shape.rows_per_expert):
        up_gate(a_RF, chunk, weights, activation)
        down(out_TD, workspace.ordered, a_RF, chunk, weights)


def fused_backward_experts_(
    gradients: Gradients,
    dout_TD: torch.Tensor,
    tokens: RoutedTokens,
    weights: ExpertWeights,
    activation: SwiGLU,
    workspace: FusedBackwardWorkspace,
) -> None:
    """``experts.backward_experts_`` by the kernels."""
    shape, hidden = workspace.shape, workspace.hidden_for(gradients)
    dscores_N = None if gradients.dscores_TK is None else gradients.dscores_TK.view(-1)
    start, end = tokens.bounds
    if start == end:  # and no chunk in which the kernels would begin idle experts' gradients
        gradients.begin_idle_experts(tokens.segments)
    for chunk in chunks(tokens, shape.max_rows, shape.rows_per_expert):
        hidden_backward(hidden, dscores_N, dout_TD, chunk, weights, activation)
        if gradients.weights is not None:
            accumulates = gradients.accumulate_weights
            weight_gradients(gradients.weights, hidden, dout_TD, chunk, accumulates)
        if gradients.dx_TD is not None:
            dx(gradients.dx_TD, workspace.ordered, hidden, chunk, weights)
