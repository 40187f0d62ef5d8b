"""The computation of experts on the rows routed to them: forward, and backward with recompute."""

from relay_kernels.activation import SwiGLU
from relay_kernels.choice import KERNELS, KernelChoiceError, uses_triton
from relay_kernels.experts import (
    backward_experts_,
    backward_workspace,
    backward_workspace_bytes,
    forward_experts_,
    forward_workspace,
    forward_workspace_bytes,
)
from relay_kernels.routing import route_rows
from relay_kernels.rows import RoutedTokens, Segment
from relay_kernels.weights import ExpertWeights, Gradients
from relay_kernels.workspace import StepShape

__all__ = [
    "KERNELS",
    "ExpertWeights",
    "Gradients",
    "KernelChoiceError",
    "RoutedTokens",
    "Segment",
    "StepShape",
    "SwiGLU",
    "backward_experts_",
    "backward_workspace",
    "backward_workspace_bytes",
    "forward_experts_",
    "forward_workspace",
    "forward_workspace_bytes",
    "route_rows",
    "uses_triton",
]
