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
        self.gradients = Gradients(
            torch.zeros_like(problem.x_TD),
            torch.zeros_like(problem.tokens.scores_TK),
            problem.weights.empty_like(num_experts),
        )

    def forward(self) -> torch.Tensor:
        """``out_TD``."""
        p = self.problem
        forward_experts_(self.out_TD.zero_(), p.tokens, p.weights, SwiGLU(), self._forward)
        return self.out_TD

    def backward(self) -> list[torch.Tensor]:
        """dx, dscores, dW1, dW2, dW3."""
        into, p = self.gradients, self.problem
        assert into.dx_TD is not None
        assert into.dscores_TK is not None
        assert into.weights is not None
        into.dx_TD.zero_()
        backward_experts_(into, p.dout_TD, p.tokens, p.weights, SwiGLU(), self._backward)
        return [into.dx_TD, into.dscores_TK, *into.weights.tensors()]
