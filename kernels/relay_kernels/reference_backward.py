"""The backward ops in plain PyTorch: what their kernels must compute.

Written to be read, expert by expert; float32 between products. ``backward_step`` is what a CPU
runs.

Shape legend: T tokens, K top-k, N = T * K routed rows, R rows of the chunk, n of one expert, D
model dimension, F expert hidden dimension, g experts.
"""

from collections.abc import Iterator

import torch

from relay_kernels.activation import SwiGLU
from relay_kernels.chunk import Chunk
from relay_kernels.reference_forward import linear
from relay_kernels.weights import ExpertWeights


def hidden_backward(
    dh1_RF: torch.Tensor | None,
    dh3_RF: torch.Tensor | None,
    a_RF: torch.Tensor | None,
    dscores_N: torch.Tensor | None,
    x_TD: torch.Tensor,
    dout_TD: torch.Tensor,
    scores_N: torch.Tensor,
    chunk: Chunk,
    weights: ExpertWeights,
    activation: SwiGLU,
) -> None:
    for expert, start, end in chunk.segments():
        row_n = chunk.rows_N[start:end].long()
        x_nD, g_nD = x_TD[row_n // chunk.top_k], dout_TD[row_n // chunk.top_k]
        h1_nF = linear(x_nD, weights.w1_gFD, weights.b1_gF, expert)
        h3_nF = linear(x_nD, weights.w3_gFD, weights.b3_gF, expert)
        u_nF = linear(g_nD, weights.w2_gDF.transpose(1, 2), None, expert)
        score_n1 = scores_N[row_n].to(u_nF.dtype)[:, None]
        a_nF, da1_nF, da3_nF = _activation_and_slopes(h1_nF, h3_nF, activation)
        here = slice(start - chunk.first, end - chunk.first)
        if dscores_N is not None:
            dscore_n = (u_nF * a_nF).sum(1)
            if weights.b2_gD is not None:
                dscore_n += g_nD.to(u_nF.dtype) @ weights.b2_gD[expert].to(u_nF.dtype)
            dscores_N[row_n] = dscore_n.to(dscores_N.dtype)
        if a_RF is not None:
            a_RF[here] = score_n1 * a_nF
        if dh1_RF is not None and dh3_RF is not None:
            dh1_RF[here] = score_n1 * u_nF * da1_nF
            dh3_RF[here] = score_n1 * u_nF * da3_nF


def _activation_and_slopes(
    h1_nF: torch.Tensor, h3_nF: torch.Tensor, activation: SwiGLU
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The activation's value and its derivatives in ``h1`` and ``h3``."""
    gate_nF = h1_nF.clamp(max=activation.limit)
    up_nF = h3_nF.clamp(-activation.limit, activation.limit) + activation.up_offset
    sigmoid_nF = torch.sigmoid(activation.alpha * gate_nF)
    slope_nF = sigmoid_nF * (1 + activation.alpha * gate_nF * (1 - sigmoid_nF))
    slope1_nF = (up_nF * slope_nF).masked_fill(h1_nF > activation.limit, 0.0)
    slope3_nF = (gate_nF * sigmoid_nF).masked_fill(h3_nF.abs() > activation.limit, 0.0)
    return gate_nF * sigmoid_nF * up_nF, slope1_nF, slope3_nF


def dx_scatter(
    dx_TD: torch.Tensor,
    dh1_RF: torch.Tensor,
    dh3_RF: torch.Tensor,
    chunk: Chunk,
    w1_gFD: torch.Tensor,
    w3_gFD: torch.Tensor,
) -> None:
    for start, end, dx_nD in _dx(dh1_RF, dh3_RF, chunk, w1_gFD, w3_gFD):
        token_n = chunk.rows_N[start:end].long() // chunk.top_k
        dx_TD.index_add_(0, token_n, dx_nD.to(dx_TD.dtype))


def dx_rows(
    y_RD: torch.Tensor,
    positions_N: torch.Tensor,
    dh1_RF: torch.Tensor,
    dh3_RF: torch.Tensor,
    chunk: Chunk,
    w1_gFD: torch.Tensor,
    w3_gFD: torch.Tensor,
) -> None:
    for start, end, dx_nD in _dx(dh1_RF, dh3_RF, chunk, w1_gFD, w3_gFD):
        y_RD[start - chunk.first : end - chunk.first] = dx_nD
        i_n = torch.arange(start, end, dtype=positions_N.dtype, device=positions_N.device)
        positions_N[chunk.rows_N[start:end].long()] = i_n


def _dx(
    dh1_RF: torch.Tensor,
    dh3_RF: torch.Tensor,
    chunk: Chunk,
    w1_gFD: torch.Tensor,
    w3_gFD: torch.Tensor,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """``(start, end, dx)`` of each expert's rows."""
    for expert, start, end in chunk.segments():
        here = slice(start - chunk.first, end - chunk.first)
        dx_nD = linear(dh1_RF[here], w1_gFD.transpose(1, 2), None, expert)
        yield start, end, dx_nD + linear(dh3_RF[here], w3_gFD.transpose(1, 2), None, expert)


def weight_gradients(
    into: ExpertWeights,
    dh1_RF: torch.Tensor,
    dh3_RF: torch.Tensor,
    a_RF: torch.Tensor,
    x_TD: torch.Tensor,
    dout_TD: torch.Tensor,
    scores_N: torch.Tensor,
    chunk: Chunk,
    accumulates: bool,
) -> None:
    if not accumulates:
        _zero_beginning_experts(into, chunk)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    for expert, start, end in chunk.segments():
        here = slice(start - chunk.first, end - chunk.first)
        row_n = chunk.rows_N[start:end].long()
        x_nD, g_nD = x_TD[row_n // chunk.top_k].to(wide), dout_TD[row_n // chunk.top_k].to(wide)
        dh1_nF, dh3_nF, a_nF = (tensor[here].to(wide) for tensor in (dh1_RF, dh3_RF, a_RF))
        into.w1_gFD[expert] += dh1_nF.t() @ x_nD
        into.w2_gDF[expert] += g_nD.t() @ a_nF
        into.w3_gFD[expert] += dh3_nF.t() @ x_nD
        if into.b1_gF is not None and into.b2_gD is not None and into.b3_gF is not None:
            into.b1_gF[expert] += dh1_nF.sum(0)
            into.b2_gD[expert] += g_nD.t() @ scores_N[row_n].to(wide)
            into.b3_gF[expert] += dh3_nF.sum(0)


def _zero_beginning_experts(into: ExpertWeights, chunk: Chunk) -> None:
    """Zeros for the experts whose rows begin in this chunk, and for those that have none here."""
    offsets = chunk.offsets_G.tolist()
    for expert, start in enumerate(offsets[:-1]):
        is_behind = start == offsets[-1] == chunk.last
        if chunk.first <= start < chunk.last or is_behind:
            for tensor in into.tensors():
                tensor[expert].zero_()
