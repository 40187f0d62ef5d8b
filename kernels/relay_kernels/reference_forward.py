"""The forward ops in plain PyTorch: what their kernels must compute.

Written to be read, expert by expert; float32 between products. ``forward_step`` is what a CPU runs.

Shape legend: T tokens, K top-k, N = T * K routed rows, R rows of the chunk, n of one expert, D
model dimension, F expert hidden dimension, g experts.
"""

import torch

from relay_kernels.activation import SwiGLU, activate_
from relay_kernels.chunk import Chunk


def up_gate(
    a_RF: torch.Tensor,
    x_TD: torch.Tensor,
    chunk: Chunk,
    w1_gFD: torch.Tensor,
    w3_gFD: torch.Tensor,
    b1_gF: torch.Tensor | None,
    b3_gF: torch.Tensor | None,
    activation: SwiGLU,
) -> None:
    for expert, start, end in chunk.segments():
        x_nD = x_TD[chunk.rows_N[start:end].long() // chunk.top_k]
        h1_nF = linear(x_nD, w1_gFD, b1_gF, expert)
        h3_nF = linear(x_nD, w3_gFD, b3_gF, expert)
        a_RF[start - chunk.first : end - chunk.first] = activate_(h1_nF, h3_nF, activation)


def down_scatter(
    out_TD: torch.Tensor,
    a_RF: torch.Tensor,
    scores_N: torch.Tensor,
    chunk: Chunk,
    w2_gDF: torch.Tensor,
    b2_gD: torch.Tensor | None,
) -> None:
    for start, end, y_nD in _down(a_RF, scores_N, chunk, w2_gDF, b2_gD):
        token_n = chunk.rows_N[start:end].long() // chunk.top_k
        out_TD.index_add_(0, token_n, y_nD.to(out_TD.dtype))


def down_rows(
    y_RD: torch.Tensor,
    positions_N: torch.Tensor,
    a_RF: torch.Tensor,
    scores_N: torch.Tensor,
    chunk: Chunk,
    w2_gDF: torch.Tensor,
    b2_gD: torch.Tensor | None,
) -> None:
    for start, end, y_nD in _down(a_RF, scores_N, chunk, w2_gDF, b2_gD):
        y_RD[start - chunk.first : end - chunk.first] = y_nD
        i_n = torch.arange(start, end, dtype=positions_N.dtype, device=positions_N.device)
        positions_N[chunk.rows_N[start:end].long()] = i_n


def sum_rows(
    out_TD: torch.Tensor, y_RD: torch.Tensor, positions_N: torch.Tensor, chunk: Chunk
) -> None:
    row_n = chunk.rows_N[chunk.first : chunk.last].long()
    # In order of row number, hence of token and then of choice.
    row_n = row_n.sort().values
    y_nD = y_RD[positions_N[row_n].long() - chunk.first]
    sum_TD = torch.zeros_like(out_TD, dtype=torch.promote_types(y_RD.dtype, torch.float32))
    sum_TD.index_add_(0, row_n // chunk.top_k, y_nD.to(sum_TD.dtype))
    out_TD.copy_(out_TD + sum_TD)


def linear(
    x_nA: torch.Tensor, weights_gBA: torch.Tensor, bias_gB: torch.Tensor | None, expert: int
) -> torch.Tensor:
    """``x W^T + b`` of one expert, in float32 or wider."""
    dtype = torch.promote_types(x_nA.dtype, torch.float32)
    result_nB = x_nA.to(dtype) @ weights_gBA[expert].to(dtype).t()
    return result_nB if bias_gB is None else result_nB + bias_gB[expert]


def _down(
    a_RF: torch.Tensor,
    scores_N: torch.Tensor,
    chunk: Chunk,
    w2_gDF: torch.Tensor,
    b2_gD: torch.Tensor | None,
) -> list[tuple[int, int, torch.Tensor]]:
    """``(start, end, y)`` of each expert, scaled by the scores."""
    results = []
    for expert, start, end in chunk.segments():
        y_nD = linear(a_RF[start - chunk.first : end - chunk.first], w2_gDF, b2_gD, expert)
        score_n = scores_N[chunk.rows_N[start:end].long()].to(y_nD.dtype)
        results.append((start, end, y_nD * score_n[:, None]))
    return results
