"""Forward of some consecutive experts over the rows routed to them, in plain PyTorch.

Steps of at most R rows of one expert, each a few products into buffers that already exist.

Shape legend: T tokens, K top-k, N = T * K routed rows, n rows of this step (at most R), D model
dimension, F expert hidden dimension, g experts held together.
"""

from collections.abc import Iterator, Sequence

import torch

from relay_kernels.activation import SwiGLU, activate_
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace import ForwardWorkspace

# Rows ``start <= i < end`` of the sorted rows belong to one expert.
Segment = tuple[int, int]


def step_forward_experts_(
    out_TD: torch.Tensor,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    rows_N: torch.Tensor,
    segments: Sequence[Segment],
    weights: ExpertWeights,
    activation: SwiGLU,
    workspace: ForwardWorkspace,
) -> None:
    """``forward.forward_experts_`` in plain PyTorch."""
    scores_N = scores_TK.reshape(-1)
    top_k = scores_TK.shape[1]
    hidden = workspace.hidden
    for expert, first, last in steps(segments, workspace.max_rows):
        _, token_n, score_n1 = workspace.index.load(rows_N[first:last], scores_N, top_k)
        num_rows = last - first
        x_nD = torch.index_select(x_TD, 0, token_n, out=workspace.x_RD[:num_rows])
        h1_nF, h3_nF = hidden.math(num_rows)
        hidden.product(x_nD, weights.w1_gFD[expert].t(), of_expert(weights.b1_gF, expert), h1_nF)
        hidden.product(x_nD, weights.w3_gFD[expert].t(), of_expert(weights.b3_gF, expert), h3_nF)
        # The score is applied to F columns before the down projection, not to D after it.
        a_nF = hidden.operand(0, activate_(h1_nF, h3_nF, activation).mul_(score_n1))
        y_nD = torch.mm(a_nF, weights.w2_gDF[expert].t(), out=workspace.y_RD[:num_rows])
        if weights.b2_gD is not None:
            y_nD.addr_(score_n1.squeeze(1).to(y_nD.dtype), weights.b2_gD[expert])
        out_TD.index_add_(0, token_n, y_nD)


def steps(segments: Sequence[Segment], max_rows: int) -> Iterator[tuple[int, int, int]]:
    """``(expert, first, last)``: every segment cut into steps of at most ``max_rows`` rows."""
    for expert, (start, end) in enumerate(segments):
        for first in range(start, end, max_rows):
            yield expert, first, min(first + max_rows, end)


def of_expert(bias_gX: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias_gX is None else bias_gX[expert]
