"""Forward of some consecutive experts over the rows routed to them, by the Triton kernels.

Two launches a chunk of rows, three where sums have a fixed order. They never wait for the device.
Imports triton, so that nothing imports it before it is known to be needed.

Shape legend: T tokens, R rows of a chunk, D model dimension, F expert hidden dimension.
"""

import torch

from relay_kernels.activation import SwiGLU
from relay_kernels.rows import RoutedTokens, chunks
from relay_kernels.triton.launch_forward import down, up_gate
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace import FusedForwardWorkspace


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
