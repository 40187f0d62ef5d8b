"""The layer's forward and backward as the relay runs them on one rank, in steps of some rows."""

import torch

from kernel_bench.problem import Problem
from relay_kernels import (
    Gradients,
    StepShape,
    SwiGLU,
    backward_experts_,
    backward_workspace,
    forward_experts_,
    forward_workspace,
)


class RelayLayer:
    """Buffers are made once: in a relay they are an allocator's work of microseconds per call."""

    def __init__(
        self, problem: Problem, kernels: str, *, deterministic: bool, max_rows: int
    ) -> None:
        num_experts, expert_dim, dim = problem.weights.w1_gFD.shape
        self.problem = problem
        shape = StepShape(
            max_rows, dim, expert_dim, problem.x_TD.dtype, problem.x_TD.device,
            kernels=kernels, deterministic=deterministic, num_rows=problem.num_rows,
            rows_per_expert=problem.rows_per_expert,
        )  # fmt: skip
        self._forward = forward_workspace(shape)
        self._backward = backward_workspace(shape, problem.x_TD.dtype)
        self.out_TD = torch.zeros_like(problem.x_TD)
        dx_TD = torch.zeros_like(problem.x_TD)
        dscores_TK = torch.zeros_like(problem.tokens.scores_TK)
        dweights = problem.weights.empty_like(num_experts)
        self._into = Gradients(dx_TD, dscores_TK, dweights)
        self._gradients = [dx_TD, dscores_TK, *dweights.tensors()]

    def forward(self) -> torch.Tensor:
        """``out_TD``."""
        p = self.problem
        forward_experts_(self.out_TD.zero_(), p.tokens, p.weights, SwiGLU(), self._forward)
        return self.out_TD

    def backward(self) -> list[torch.Tensor]:
        """dx, dscores, dW1, dW2, dW3."""
        p = self.problem
        self._gradients[0].zero_()  # summed into
        backward_experts_(self._into, p.dout_TD, p.tokens, p.weights, SwiGLU(), self._backward)
        return self._gradients
