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


def expert_rows(out_TD, tokens, weights, activation=None):
    """``out[t] += score * expert(x[t])`` by a loop over rows; differentiable."""
    pieces = [out_TD]
    for expert, (start, end) in enumerate(tokens.segments):
        for row in tokens.rows_N[start:end].tolist():
            token, choice = divmod(row, tokens.scores_TK.shape[1])
            gate = weights.w1_gFD[expert] @ tokens.x_TD[token]
            up = weights.w3_gFD[expert] @ tokens.x_TD[token]
            if weights.b1_gF is not None:
                gate, up = gate + weights.b1_gF[expert], up + weights.b3_gF[expert]
            y_D = weights.w2_gDF[expert] @ activated(gate, up, activation)
            if weights.b2_gD is not None:
                y_D = y_D + weights.b2_gD[expert]
            update = torch.zeros_like(out_TD)
            update[token] = 1.0
            pieces.append(update * (tokens.scores_TK[token, choice] * y_D))
    return sum(pieces)
