"""The computation of experts on the rows routed to them: forward, and backward with recompute."""

from relay_kernels.activation import SwiGLU
from relay_kernels.backward import (
    backward_experts_,
    backward_workspace,
    backward_workspace_bytes,
)
from relay_kernels.choice import KERNELS, KernelChoiceError, uses_triton
from relay_kernels.forward import (
    forward_experts_,
    forward_workspace,
    forward_workspace_bytes,
)
from relay_kernels.forward_step import Segment
from relay_kernels.gradients import Gradients
from relay_kernels.ops_routing import route_rows
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace import BackwardWorkspace, ForwardWorkspace, StepShape
from relay_kernels.workspace_fused import FusedBackwardWorkspace, FusedForwardWorkspace

__all__ = [
    "KERNELS",
    "BackwardWorkspace",
    "ExpertWeights",
    "ForwardWorkspace",
    "FusedBackwardWorkspace",
    "FusedForwardWorkspace",
    "Gradients",
    "KernelChoiceError",
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
