"""The same layer with PyTorch's grouped matrix products and separate gather, SwiGLU and scatter.

What one would write without fused kernels: every step is a pass over memory of its own, and all
N rows exist at once. The backward rebuilds the hidden activations, as the relay's does, so the two
do the same products; given ``kept`` ones it does not.

Shape legend: T tokens, N routed rows, D model dimension, F expert hidden dimension, E experts.
"""

import torch
import torch.nn.functional as F

from kernel_bench.problem import Problem

Tensors = tuple[torch.Tensor, ...]


def forward(problem: Problem) -> torch.Tensor:
    """``out_TD``."""
    return down(problem, up_gate(problem))


def backward(problem: Problem, kept: Tensors | None = None) -> list[torch.Tensor]:
    """dx, dscores, dW1, dW2, dW3; ``kept`` is x, h1 and h3 of all rows."""
    x_ND, h1_NF, h3_NF = kept or projections(problem)
    g_ND = problem.dout_TD[problem.token_N]
    dh1_NF, dh3_NF, a_NF, dscores_TK = _hidden_backward(problem, g_ND, h1_NF, h3_NF)
    dweights = _weight_gradients(problem, x_ND, g_ND, dh1_NF, dh3_NF, a_NF)
    return [dx(problem, dh1_NF, dh3_NF), dscores_TK, *dweights]


def projections(problem: Problem) -> Tensors:
    """x, h1 and h3 of all rows."""
    w, x_ND = problem.weights, problem.x_TD[problem.token_N]
    h1_NF = _grouped(x_ND, w.w1_gFD.transpose(1, 2), problem)
    return x_ND, h1_NF, _grouped(x_ND, w.w3_gFD.transpose(1, 2), problem)


def up_gate(problem: Problem) -> torch.Tensor:
    """``a_NF``."""
    _, h1_NF, h3_NF = projections(problem)
    return F.silu(h1_NF) * h3_NF


def down(problem: Problem, a_NF: torch.Tensor) -> torch.Tensor:
    """``out_TD``."""
    y_ND = _grouped(a_NF, problem.weights.w2_gDF.transpose(1, 2), problem)
    y_ND = (y_ND * _score_N1(problem)).to(y_ND.dtype)
    return torch.zeros_like(problem.x_TD).index_add_(0, problem.token_N, y_ND)


def hidden_backward(problem: Problem) -> Tensors:
    """dh1, dh3, a times the score, and dscores; with gathers."""
    _, h1_NF, h3_NF = projections(problem)
    return _hidden_backward(problem, problem.dout_TD[problem.token_N], h1_NF, h3_NF)


def dx(problem: Problem, dh1_NF: torch.Tensor, dh3_NF: torch.Tensor) -> torch.Tensor:
    """``dx_TD``."""
    w = problem.weights
    dx_ND = _grouped(dh1_NF, w.w1_gFD, problem) + _grouped(dh3_NF, w.w3_gFD, problem)
    return torch.zeros_like(problem.x_TD).index_add_(0, problem.token_N, dx_ND)


def weight_gradients(
    problem: Problem, dh1_NF: torch.Tensor, dh3_NF: torch.Tensor, a_NF: torch.Tensor
) -> Tensors:
    """dW1, dW2, dW3; with gathers."""
    x_ND, g_ND = problem.x_TD[problem.token_N], problem.dout_TD[problem.token_N]
    return _weight_gradients(problem, x_ND, g_ND, dh1_NF, dh3_NF, a_NF)


def _hidden_backward(
    problem: Problem, g_ND: torch.Tensor, h1_NF: torch.Tensor, h3_NF: torch.Tensor
) -> Tensors:
    score_N1, gate_NF = _score_N1(problem), F.silu(h1_NF)
    a_NF = gate_NF * h3_NF
    u_NF = _grouped(g_ND, problem.weights.w2_gDF, problem)
    dscores_TK = torch.zeros_like(problem.tokens.scores_TK)
    dscores_TK.view(-1)[problem.tokens.rows_N.long()] = (u_NF.float() * a_NF.float()).sum(1)
    da_NF = (u_NF * score_N1).to(u_NF.dtype)
    dh1_NF = torch.ops.aten.silu_backward(da_NF * h3_NF, h1_NF)
    return dh1_NF, da_NF * gate_NF, (a_NF * score_N1).to(a_NF.dtype), dscores_TK


def _weight_gradients(
    problem: Problem,
    x_ND: torch.Tensor,
    g_ND: torch.Tensor,
    dh1_NF: torch.Tensor,
    dh3_NF: torch.Tensor,
    a_NF: torch.Tensor,
) -> Tensors:
    pairs = ((dh1_NF, x_ND), (g_ND, a_NF), (dh3_NF, x_ND))
    return tuple(_grouped(left.t(), right, problem) for left, right in pairs)


def _grouped(left: torch.Tensor, right: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Each expert's rows times its matrix; of two matrices of rows, one product an expert."""
    return torch._grouped_mm(left, right, offs=problem.offsets_G[1:])


def _score_N1(problem: Problem) -> torch.Tensor:
    return problem.tokens.scores_TK.reshape(-1)[problem.tokens.rows_N.long()].unsqueeze(1)
