"""Backward of some consecutive experts over the rows routed to them, in plain PyTorch.

Nothing of the forward is kept: hidden activations are rebuilt step by step and released before the
next. For the rows of one expert, with ``g`` the output's gradient at a row's token and ``s`` its
score:

    h1 = W1 x        h3 = W3 x        gate = silu(h1)        a = gate * h3
    u  = W2^T g      ds = <u, a>                    (no down projection is recomputed for ds)
    dh3 = s * u * gate          dh1 = s * u * h3 * silu'(h1)
    dW2 += g^T (s * a)          dW1 += dh1 x^T        dW3 += dh3 x^T
    dx  += W1^T dh1 + W3^T dh3

Shape legend: T tokens, K top-k, N = T * K routed rows, n rows of this step (at most R), m of them
of one expert, b of a block, D model dimension, F expert hidden dimension, g experts held together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relay_kernels.activation import SwiGLU, activate_for_backward_
from relay_kernels.rows import RoutedTokens
from relay_kernels.steps_forward import (
    Cut,
    Step,
    add_rows_,
    cut,
    products_,
    steps,
    transposed,
)
from relay_kernels.weights import ExpertWeights, Gradients
from relay_kernels.workspace import BackwardWorkspace


@dataclass(frozen=True)
class _Matrices:
    """Each expert's matrices, cut out once for all steps."""

    w1: Sequence[torch.Tensor]
    w2: Sequence[torch.Tensor]
    w3: Sequence[torch.Tensor]
    w1_transposed: Sequence[torch.Tensor]
    w3_transposed: Sequence[torch.Tensor]

    @staticmethod
    def of(weights: ExpertWeights) -> "_Matrices":
        w1, w2, w3 = weights.w1_gFD, weights.w2_gDF, weights.w3_gFD
        return _Matrices(w1.unbind(0), w2.unbind(0), w3.unbind(0), transposed(w1), transposed(w3))


@dataclass(frozen=True)
class _Call:
    """What every step of one call works with."""

    gradients: Gradients
    weights: ExpertWeights
    matrices: _Matrices
    activation: SwiGLU
    workspace: BackwardWorkspace


def step_backward_experts_(
    gradients: Gradients,
    dout_TD: torch.Tensor,
    tokens: RoutedTokens,
    weights: ExpertWeights,
    activation: SwiGLU,
    workspace: BackwardWorkspace,
) -> None:
    """``experts.backward_experts_`` in plain PyTorch."""
    gradients.begin_idle_experts(tokens.segments)
    matrices = _Matrices.of(weights)
    call = _Call(gradients, weights, matrices, activation, workspace)
    workspace.index.begin(tokens)
    for step in steps(tokens.segments, workspace.max_rows):
        num_rows = step.last - step.first
        token_n, score_n1 = workspace.index.of(step.first, step.last)
        x_nD = torch.index_select(tokens.x_TD, 0, token_n, out=workspace.x_RD[:num_rows])
        g_nD = torch.index_select(dout_TD, 0, token_n, out=workspace.g_RD[:num_rows])
        x, g = cut(step, x_nD, g_nD)
        row_n = tokens.rows_N[step.first : step.last]
        dh1, dh3, a = _hidden_gradients(call, step, x, g, row_n, score_n1)
        if gradients.weights is not None:
            (score,) = cut(step, score_n1)
            operands = zip(step.begins, step.experts, dh1, dh3, a, x, g, score, strict=True)
            for begins, expert, *of_expert in operands:
                accumulate = gradients.accumulate_weights or not begins
                _weight_gradients_(gradients.weights, expert, accumulate, of_expert, workspace)
        if gradients.dx_TD is not None:
            for expert, dh1_mF, dh3_mF, dx_mD in zip(step.experts, dh1, dh3, g, strict=True):
                torch.mm(dh1_mF, matrices.w1[expert], out=dx_mD)
                dx_mD.addmm_(dh3_mF, matrices.w3[expert])
            add_rows_(gradients.dx_TD, token_n, g_nD, step)


def _hidden_gradients(
    call: _Call, step: Step, x: Cut, g: Cut, row_n: torch.Tensor, score_n1: torch.Tensor
) -> tuple[Cut, Cut, Cut]:
    """``dh1, dh3`` and ``a``, all scaled by the score; writes the score gradients.

    They take the places of ``h1, h3`` and ``u``, block by block.
    """
    weights, matrices, workspace = call.weights, call.matrices, call.workspace
    num_rows, hidden = step.last - step.first, workspace.hidden
    h1_nF, h3_nF, u_nF = hidden.wide(num_rows)
    h1, h3, u = cut(step, h1_nF, h3_nF, u_nF)
    products_(h1, x, matrices.w1_transposed, weights.b1_gF, step)
    products_(h3, x, matrices.w3_transposed, weights.b3_gF, step)
    products_(u, g, matrices.w2, None, step)
    dscores_TK, dscore_n = call.gradients.dscores_TK, workspace.dscore_R[:num_rows]
    for rows in hidden.blocks(num_rows):
        block = hidden.load(h1_nF[rows], h3_nF[rows], u_nF[rows])
        buffers = [*block, *hidden.extra(rows.stop - rows.start)]
        dscore_b = None if dscores_TK is None else dscore_n[rows]
        results = _block_gradients(buffers, score_n1[rows], call.activation, workspace, dscore_b)
        for target, value in zip((h1_nF, h3_nF, u_nF), results, strict=True):
            _store_(target[rows], value)
    if dscores_TK is not None:
        if weights.b2_gD is not None:
            (dscore,) = cut(step, dscore_n)
            for expert, g_mD, dscore_m in zip(step.experts, g, dscore, strict=True):
                dscore_m += torch.mv(g_mD, weights.b2_gD[expert])
        long_row_n = workspace.row_R[:num_rows].copy_(row_n)
        dscores_TK.view(-1).index_copy_(0, long_row_n, dscore_n.to(dscores_TK.dtype))
    return h1, h3, u


def _block_gradients(
    buffers: Sequence[torch.Tensor],
    score_b1: torch.Tensor,
    activation: SwiGLU,
    workspace: BackwardWorkspace,
    dscore_b: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``dh1, dh3, a`` of a block, each scaled by the score, in the place of ``h1, h3, u``.

    ``buffers`` are those three and two more. A buffer is given a new meaning as soon as its old one
    has been used for the last time.
    """
    h1_bF, h3_bF, u_bF, gate_bF, a_bF = buffers
    cut1_bF, cut3_bF = workspace.cut_2BF[:, : score_b1.shape[0]].unbind(0)
    activate_for_backward_(h1_bF, h3_bF, gate_bF, a_bF, cut1_bF, cut3_bF, activation)
    dh3_bF = gate_bF.mul_(u_bF)
    u_bF.mul_(h3_bF)
    if dscore_b is not None:
        # <u, a> = sum over F of (u * gate) * h3; h3 is not needed after this.
        torch.mv(h3_bF.mul_(dh3_bF), workspace.ones_F, out=dscore_b)
    dh1_bF = torch.ops.aten.silu_backward.grad_input(u_bF, h1_bF, grad_input=h1_bF)
    if activation.is_clamped:
        dh1_bF.masked_fill_(cut1_bF, 0.0)
        dh3_bF.masked_fill_(cut3_bF, 0.0)
    dh1_bF.mul_(score_b1)
    torch.mul(dh3_bF, score_b1, out=h3_bF)
    torch.mul(a_bF, score_b1, out=u_bF)
    return dh1_bF, h3_bF, u_bF


def _store_(target: torch.Tensor, value: torch.Tensor) -> None:
    """Round ``value`` into ``target``, unless it was computed there."""
    if value.data_ptr() != target.data_ptr():
        target.copy_(value)


def _weight_gradients_(
    into: ExpertWeights,
    expert: int,
    accumulate: bool,
    operands: Sequence[torch.Tensor],
    workspace: BackwardWorkspace,
) -> None:
    """Sum one expert's ``left^T right`` into W1's, W2's and W3's gradients (or begin them), and
    the biases' sums of rows."""
    dh1_nF, dh3_nF, a_nF, x_nD, g_nD, score_n1 = operands
    products = (
        (into.w1_gFD[expert], dh1_nF, x_nD),
        (into.w2_gDF[expert], g_nD, a_nF),
        (into.w3_gFD[expert], dh3_nF, x_nD),
    )
    for total, left_nA, right_nB in products:
        if workspace.product is None:
            # beta = 0 ignores what is in the buffer: an expert's first step needs no zeros.
            total.addmm_(left_nA.t(), right_nB, beta=1 if accumulate else 0)
            continue
        # Summed in a wider dtype: each step's product is rounded once, their sum is not.
        product = workspace.product.view(total.shape)
        torch.mm(left_nA.t(), right_nB, out=product)
        _add_or_begin_(total, product, accumulate)
    if into.b1_gF is not None and into.b2_gD is not None and into.b3_gF is not None:
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
