"""Backward of some consecutive experts over the rows routed to them, in plain PyTorch.

Nothing of the forward is kept: hidden activations are rebuilt step by step and released before the
next. For the rows of one expert, with ``g`` the output's gradient at a row's token and ``s`` its
score:

    h1 = W1 x        h3 = W3 x        gate = silu(h1)        a = gate * h3
    u  = W2^T g      ds = <u, a>                    (no down projection is recomputed for ds)
    dh3 = s * u * gate          dh1 = s * u * h3 * silu'(h1)
    dW2 += g^T (s * a)          dW1 += dh1 x^T        dW3 += dh3 x^T
    dx  += W1^T dh1 + W3^T dh3

Shape legend: T tokens, K top-k, N = T * K routed rows, n rows of this step (at most R), D model
dimension, F expert hidden dimension, g experts held together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relay_kernels.activation import SwiGLU, activate_for_backward_
from relay_kernels.forward_step import Segment, of_expert, steps
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace import BackwardWorkspace


@dataclass(frozen=True)
class Gradients:
    """Where gradients go; None means that nobody asks for that one, and its work is left out.

    ``dx_TD`` is summed into and ``dscores_TK`` is written. ``weights`` is summed into if
    ``accumulate_weights``, and otherwise overwritten (with zeros for an expert without rows).
    """

    dx_TD: torch.Tensor | None
    dscores_TK: torch.Tensor | None
    weights: ExpertWeights | None
    accumulate_weights: bool = False


def backward_experts_(
    gradients: Gradients,
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    rows_N: torch.Tensor,
    segments: Sequence[Segment],
    weights: ExpertWeights,
    activation: SwiGLU,
    workspace: BackwardWorkspace,
) -> None:
    """Gradients of ``forward_experts_`` for the rows of the segments.

    Score gradients are written for these rows alone: each row belongs to one expert.
    """
    assert len(segments) == weights.num_experts
    scores_N = scores_TK.reshape(-1)
    top_k = scores_TK.shape[1]
    if gradients.weights is not None and not gradients.accumulate_weights:
        _zero_experts_without_rows(gradients.weights, segments)
    for expert, first, last in steps(segments, workspace.max_rows):
        row_n, token_n, score_n1 = workspace.index.load(rows_N[first:last], scores_N, top_k)
        num_rows = last - first
        x_nD = torch.index_select(x_TD, 0, token_n, out=workspace.x_RD[:num_rows])
        g_nD = torch.index_select(dout_TD, 0, token_n, out=workspace.g_RD[:num_rows])
        dh1_nF, dh3_nF, a_nF = _hidden_gradients(
            gradients, x_nD, g_nD, row_n, score_n1, weights, expert, activation, workspace
        )
        if gradients.weights is not None:
            accumulate = gradients.accumulate_weights or first != segments[expert][0]
            products = ((dh1_nF, x_nD), (g_nD, a_nF), (dh3_nF, x_nD))
            _weight_gradients_(gradients.weights, expert, accumulate, products, workspace)
            _bias_gradients_(gradients.weights, expert, accumulate, dh1_nF, g_nD, dh3_nF, score_n1)
        if gradients.dx_TD is not None:
            dx_nD = torch.mm(dh1_nF, weights.w1_gFD[expert], out=g_nD)
            dx_nD.addmm_(dh3_nF, weights.w3_gFD[expert])
            gradients.dx_TD.index_add_(0, token_n, dx_nD)


def _hidden_gradients(
    gradients: Gradients,
    x_nD: torch.Tensor,
    g_nD: torch.Tensor,
    row_n: torch.Tensor,
    score_n1: torch.Tensor,
    weights: ExpertWeights,
    expert: int,
    activation: SwiGLU,
    workspace: BackwardWorkspace,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``dh1, dh3`` and ``a``, all scaled by the score; writes the score gradients.

    Five buffers of width F suffice because each is given a new meaning as soon as its old one has
    been used for the last time.
    """
    num_rows, hidden = x_nD.shape[0], workspace.hidden
    h1_nF, h3_nF, u_nF, gate_nF, a_nF = hidden.math(num_rows)
    hidden.product(x_nD, weights.w1_gFD[expert].t(), of_expert(weights.b1_gF, expert), h1_nF)
    hidden.product(x_nD, weights.w3_gFD[expert].t(), of_expert(weights.b3_gF, expert), h3_nF)
    hidden.product(g_nD, weights.w2_gDF[expert], None, u_nF)
    cut1_nF, cut3_nF = activate_for_backward_(h1_nF, h3_nF, gate_nF, a_nF, activation)

    dh3_nF = gate_nF.mul_(u_nF)
    u_nF.mul_(h3_nF)
    if gradients.dscores_TK is not None:
        # <u, a> = sum over F of (u * gate) * h3; h3 is not needed after this.
        dscore_n = workspace.dscore_R[:num_rows]
        torch.mv(h3_nF.mul_(dh3_nF), workspace.ones_F, out=dscore_n)
        if weights.b2_gD is not None:
            dscore_n.add_(torch.mv(g_nD, weights.b2_gD[expert]))
        dscores_N = gradients.dscores_TK.view(-1)
        dscores_N.index_copy_(0, row_n, dscore_n.to(dscores_N.dtype))
    dh1_nF = torch.ops.aten.silu_backward.grad_input(u_nF, h1_nF, grad_input=h3_nF)
    if cut1_nF is not None and cut3_nF is not None:
        dh1_nF.masked_fill_(cut1_nF, 0.0)
        dh3_nF.masked_fill_(cut3_nF, 0.0)
    return (
        hidden.operand(0, dh1_nF.mul_(score_n1)),
        hidden.operand(1, dh3_nF.mul_(score_n1)),
        hidden.operand(2, a_nF.mul_(score_n1)),
    )


def _weight_gradients_(
    into: ExpertWeights,
    expert: int,
    accumulate: bool,
    products: Sequence[tuple[torch.Tensor, torch.Tensor]],
    workspace: BackwardWorkspace,
) -> None:
    """Sum one step's ``left^T right`` into W1's, W2's and W3's gradients (or begin them)."""
    totals = (into.w1_gFD[expert], into.w2_gDF[expert], into.w3_gFD[expert])
    for total, (left_nA, right_nB) in zip(totals, products, strict=True):
        if workspace.product is None:
            # beta = 0 ignores what is in the buffer: an expert's first step needs no zeros.
            total.addmm_(left_nA.t(), right_nB, beta=1 if accumulate else 0)
            continue
        # Summed in a wider dtype: each step's product is rounded once, their sum is not.
        product = workspace.product.view(total.shape)
        torch.mm(left_nA.t(), right_nB, out=product)
        _add_or_begin_(total, product, accumulate)


def _bias_gradients_(
    into: ExpertWeights,
    expert: int,
    accumulate: bool,
    dh1_nF: torch.Tensor,
    g_nD: torch.Tensor,
    dh3_nF: torch.Tensor,
    score_n1: torch.Tensor,
) -> None:
    if into.b1_gF is None or into.b2_gD is None or into.b3_gF is None:
        return
    dtype = into.b1_gF.dtype
    _add_or_begin_(into.b1_gF[expert], dh1_nF.sum(0, dtype=dtype), accumulate)
    _add_or_begin_(into.b3_gF[expert], dh3_nF.sum(0, dtype=dtype), accumulate)
    db2_D = torch.mv(g_nD.t(), score_n1.squeeze(1).to(g_nD.dtype))
    _add_or_begin_(into.b2_gD[expert], db2_D, accumulate)


def _add_or_begin_(total: torch.Tensor, value: torch.Tensor, accumulate: bool) -> None:
    if accumulate:
        total.add_(value)
    else:
        total.copy_(value)


def _zero_experts_without_rows(into: ExpertWeights, segments: Sequence[Segment]) -> None:
    for expert, (start, end) in enumerate(segments):
        if start == end:
            for tensor in into.tensors():
                tensor[expert].zero_()
