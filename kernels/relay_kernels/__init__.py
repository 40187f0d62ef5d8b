"""The computation of experts on the rows routed to them: forward, and backward with recompute."""

from relay_kernels.activation import SwiGLU
from relay_kernels.backward_step import Gradients, backward_experts_
from relay_kernels.forward_step import Segment, forward_experts_
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace import BackwardWorkspace, ForwardWorkspace, StepShape

__all__ = [
    "BackwardWorkspace",
    "ExpertWeights",
    "ForwardWorkspace",
    "Gradients",
    "Segment",
    "StepShape",
    "SwiGLU",
    "backward_experts_",
    "forward_experts_",
]
