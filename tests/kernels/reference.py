"""One expert group's forward and backward in float64, row by row; shares no code with kernels."""

import math

import torch


def activated(h1, h3, activation=None):
    """``g sigmoid(alpha g) (u + up_offset)`` of the clamped inputs; plain SwiGLU by default."""
    alpha, limit, up_offset = 1.0, math.inf, 0.0
    if activation is not None:
        alpha, limit, up_offset = activation.alpha, activation.limit, activation.up_offset
    gate, up = h1.clamp(max=limit), h3.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + up_offset)


def expert_rows(
    out_TD, x_TD, scores_TK, rows_N, segments, w1, w2, w3, biases=None, activation=None
):
    """``out[t] += score * expert(x[t])`` by a loop over rows; differentiable."""
    top_k = scores_TK.shape[1]
    pieces = [out_TD]
    for expert, (start, end) in enumerate(segments):
        for row in rows_N[start:end].tolist():
            token, choice = divmod(row, top_k)
            gate = w1[expert] @ x_TD[token]
            up = w3[expert] @ x_TD[token]
            if biases is not None:
                gate, up = gate + biases[0][expert], up + biases[2][expert]
            y_D = w2[expert] @ activated(gate, up, activation)
            if biases is not None:
                y_D = y_D + biases[1][expert]
            update = torch.zeros_like(out_TD)
            update[token] = 1.0
            pieces.append(update * (scores_TK[token, choice] * y_D))
    return sum(pieces)
