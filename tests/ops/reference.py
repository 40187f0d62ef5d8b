"""Slow float64 references of the ops, in plain autograd, sharing no code with them."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def rope(x_BLNH: torch.Tensor, theta: float, positions_BL: torch.Tensor) -> torch.Tensor:
    """Complex numbers (first half, second half) turned by position * theta^(-2i/H)."""
    half = x_BLNH.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions_BL[:, :, None, None].double() * frequencies
    turned = torch.complex(x_BLNH[..., :half], x_BLNH[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag], dim=-1)


def attention(
    q_BLNH: torch.Tensor,
    k_BSGH: torch.Tensor,
    v_BSGU: torch.Tensor,
    allowed_BLS: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One query and head at a time, over the keys it may see."""
    num_rows, num_queries, num_heads, _ = q_BLNH.shape
    shared = num_heads // k_BSGH.shape[2]
    rows = []
    for b in range(num_rows):
        for query in range(num_queries):
            seen = allowed_BLS[b, query].nonzero().flatten()
            for head in range(num_heads):
                keys, values = (x[b, seen, head // shared] for x in (k_BSGH, v_BSGU))
                weights = torch.softmax(keys @ q_BLNH[b, query, head] * scale, dim=0)
                rows.append(weights @ values)
    return torch.stack(rows).view(num_rows, num_queries, num_heads, -1)


def feed_forward(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    gate: torch.Tensor | None,
) -> torch.Tensor:
    hidden = x @ w1.T
    out = (hidden / (1 + torch.exp(-hidden)) * (x @ w3.T)) @ w2.T
    return out if gate is None else out / (1 + torch.exp(-(x @ gate.T)))
