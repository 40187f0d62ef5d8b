"""The float64 truth of the backward's kernels, one stage at a time, for a ``Problem``.

Each stage is judged from the inputs it really had: the second from the first's rounded results.
Nothing is shared with the kernels: derivatives come from autograd on the activation's formula.

Shape legend: T tokens, K top-k, N = T * K routed rows, D model dimension, F expert hidden
dimension, n rows of one expert; tensors without a letter for rows have those between the offsets.
"""

import torch

from tests.kernels.problem import DEVICE, Problem
from tests.kernels.reference import activated


def true_hidden_backward(problem: Problem) -> tuple[torch.Tensor, ...]:
    """``dh1, dh3, a``, scaled by the score, of all rows; ``dscores_N``, NaN where no row is."""
    w1, w2, w3, b1, b2, b3 = problem.true_weights()
    pieces = []
    dscores_N = torch.full((problem.num_rows,), torch.nan, dtype=torch.float64, device=DEVICE)
    for expert, (start, end) in enumerate(problem.segments):
        row_n = problem.rows_N[start:end].long()
        x_nD = problem.x_TD[row_n // problem.top_k].double()
        g_nD = problem.dout_TD[row_n // problem.top_k].double()
        h1_nF, h3_nF = x_nD @ w1[expert].t(), x_nD @ w3[expert].t()
        if b1 is not None:
            h1_nF, h3_nF = h1_nF + b1[expert], h3_nF + b3[expert]
        h1_nF, h3_nF = h1_nF.requires_grad_(), h3_nF.requires_grad_()
        score_n = problem.scores_N[row_n].double().requires_grad_()
        a_nF = activated(h1_nF, h3_nF, problem.activation)
        y_nD = a_nF @ w2[expert].t()
        if b2 is not None:
            y_nD = y_nD + b2[expert]
        loss = (score_n[:, None] * y_nD * g_nD).sum()
        dh1_nF, dh3_nF, dscores_N[row_n] = torch.autograd.grad(loss, (h1_nF, h3_nF, score_n))
        pieces.append((dh1_nF, dh3_nF, (score_n[:, None] * a_nF).detach()))
    return *(torch.cat(each) for each in zip(*pieces, strict=True)), dscores_N


def true_dx(problem: Problem, dh1: torch.Tensor, dh3: torch.Tensor) -> torch.Tensor:
    w1, _, w3, *_ = problem.true_weights()
    dx_TD = torch.zeros(problem.num_tokens, problem.dim, dtype=torch.float64, device=DEVICE)
    for expert, here, row_n in _experts(problem):
        dx_nD = dh1[here].double() @ w1[expert] + dh3[here].double() @ w3[expert]
        dx_TD.index_add_(0, row_n // problem.top_k, dx_nD)
    return dx_TD


def true_weight_gradients(
    problem: Problem, dh1: torch.Tensor, dh3: torch.Tensor, a: torch.Tensor
) -> list[torch.Tensor]:
    """In the order of ``ExpertWeights.tensors()``."""
    sums = [torch.zeros_like(each, dtype=torch.float64) for each in problem.weights.tensors()]
    for expert, here, row_n in _experts(problem):
        x_nD = problem.x_TD[row_n // problem.top_k].double()
        g_nD = problem.dout_TD[row_n // problem.top_k].double()
        sums[0][expert] = dh1[here].double().t() @ x_nD
        sums[1][expert] = g_nD.t() @ a[here].double()
        sums[2][expert] = dh3[here].double().t() @ x_nD
        if problem.has_biases:
            sums[3][expert] = dh1[here].double().sum(0)
            sums[4][expert] = g_nD.t() @ problem.scores_N[row_n].double()
            sums[5][expert] = dh3[here].double().sum(0)
    return sums


def _experts(problem: Problem) -> list[tuple[int, slice, torch.Tensor]]:
    """For each expert its place among the rows between the offsets, and its row numbers."""
    base = problem.segments[0][0]
    return [
        (expert, slice(start - base, end - base), problem.rows_N[start:end].long())
        for expert, (start, end) in enumerate(problem.segments)
    ]
