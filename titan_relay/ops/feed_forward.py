"""A dense SwiGLU feed-forward (a shared expert, a dense layer) that keeps as little as the relay.

y = W2 (silu(W1 x) * W3 x), times sigmoid(gate x) where there is a gate. Saves its inputs only; rows
are computed a chunk at a time, and the backward rebuilds their hidden activations. In the recompute
of a block that `relay_checkpoint` runs, it is not computed again: like the relay's, its value is
needed by no gradient of a pre-norm block.

Backward, for a chunk of rows, with h1 = W1 x, h3 = W3 x, a = silu(h1) * h3, s the gate's sigmoid
and u = W2^T g: ds = <u, a> (no down-projection needed); da = s u; dh3 = da * silu(h1);
dh1 = da * h3 * silu'(h1); dW2 += (s g)^T a; dW1 += dh1^T x; dW3 += dh3^T x;
dx = W1^T dh1 + W3^T dh3 + ds s (1 - s) gate.

Shape legend: T tokens, R rows of a chunk, D model dimension, F hidden dimension.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from titan_relay.recompute.relay_checkpoint import note_relay_output, value_is_needed

# A chunk's hidden activations take about one copy of the tokens; fewer rows make GEMMs slow.
_LEAST_CPU_ROWS = 64
_LEAST_DEVICE_ROWS = 1024
_HIDDEN_COPIES = 3


def feed_forward(
    x_TD: torch.Tensor,
    w1_FD: torch.Tensor,
    w2_DF: torch.Tensor,
    w3_FD: torch.Tensor,
    gate_1D: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply the feed-forward to `x_TD`; same shape. All tensors have one dtype.

    Weight gradients are summed over chunks in the weights' dtype. Saved for backward: the inputs.
    """
    out_TD: torch.Tensor = torch.ops.titan_relay.feed_forward(x_TD, w1_FD, w2_DF, w3_FD, gate_1D)
    if not torch.compiler.is_compiling():
        note_relay_output(out_TD)
    return out_TD


@torch.library.custom_op("titan_relay::feed_forward", mutates_args=())
def _feed_forward(
    x_TD: torch.Tensor,
    w1_FD: torch.Tensor,
    w2_DF: torch.Tensor,
    w3_FD: torch.Tensor,
    gate_1D: torch.Tensor | None,
) -> torch.Tensor:
    if not value_is_needed():
        return torch.zeros_like(x_TD, memory_format=torch.contiguous_format)
    return _forward(_chunks(x_TD, w1_FD), x_TD, w1_FD, w2_DF, w3_FD, gate_1D)


@_feed_forward.register_fake
def _(x_TD: torch.Tensor, w1_FD: torch.Tensor, *weights: Any) -> torch.Tensor:
    chunks = _first_chunk(x_TD, w1_FD) if value_is_needed() else []
    return _forward(chunks, x_TD, w1_FD, *weights)


def _forward(
    chunks: Iterable[slice],
    x_TD: torch.Tensor,
    w1_FD: torch.Tensor,
    w2_DF: torch.Tensor,
    w3_FD: torch.Tensor,
    gate_1D: torch.Tensor | None,
) -> torch.Tensor:
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    for rows in chunks:
        x_RD = x_TD[rows]
        a_RF = F.silu(x_RD @ w1_FD.t(), inplace=True)
        a_RF.mul_(x_RD @ w3_FD.t())
        out_RD = torch.mm(a_RF, w2_DF.t(), out=out_TD[rows])
        if gate_1D is not None:
            out_RD.mul_(torch.sigmoid(x_RD @ gate_1D.t()))
        del a_RF  # before the next chunk's is there
    return out_TD


@torch.library.custom_op("titan_relay::feed_forward_backward", mutates_args=())
def _feed_forward_backward(
    g_TD: torch.Tensor,
    x_TD: torch.Tensor,
    w1_FD: torch.Tensor,
    w2_DF: torch.Tensor,
    w3_FD: torch.Tensor,
    gate_1D: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Gradients of x, w1, w2, w3 and, where there is one, of the gate."""
    return _gradients(_chunks(x_TD, w1_FD), g_TD, x_TD, w1_FD, w2_DF, w3_FD, gate_1D)


@_feed_forward_backward.register_fake
def _(
    g_TD: torch.Tensor, x_TD: torch.Tensor, w1_FD: torch.Tensor, *others: Any
) -> list[torch.Tensor]:
    return _gradients(_first_chunk(x_TD, w1_FD), g_TD, x_TD, w1_FD, *others)


def _gradients(
    chunks: Iterable[slice],
    g_TD: torch.Tensor,
    x_TD: torch.Tensor,
    *given: torch.Tensor | None,
) -> list[torch.Tensor]:
    weights = [weight for weight in given if weight is not None]
    dx_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    sums = [torch.zeros_like(w, memory_format=torch.contiguous_format) for w in weights]
    for rows in chunks:
        _backward_rows(rows, g_TD, x_TD, weights, dx_TD, sums)
    return [dx_TD, *sums]


def _backward_rows(
    rows: slice,
    g_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights: list[torch.Tensor],
    dx_TD: torch.Tensor,
    sums: list[torch.Tensor],
) -> None:
    """Write `dx_TD[rows]` and add these rows' part of the weights' gradients to `sums`."""
    w1_FD, w2_DF, w3_FD = weights[:3]
    x_RD, g_RD = x_TD[rows], g_TD[rows]
    h1_RF, h3_RF = x_RD @ w1_FD.t(), x_RD @ w3_FD.t()
    da_RF = g_RD @ w2_DF
    sigmoid_RF = torch.sigmoid(h1_RF)
    silu_RF = h1_RF * sigmoid_RF
    a_RF = silu_RF * h3_RF
    if len(weights) > 3:
        gate_1D = weights[3]
        s_R1 = torch.sigmoid(x_RD @ gate_1D.t())
        dlogit_R1 = (da_RF * a_RF).sum(dim=-1, keepdim=True) * s_R1 * (1 - s_R1)
        torch.mm(dlogit_R1, gate_1D, out=dx_TD[rows])
        sums[3].addmm_(dlogit_R1.t(), x_RD)
        da_RF.mul_(s_R1)
        g_RD = g_RD * s_R1
    else:
        dx_TD[rows] = 0
    sums[1].addmm_(g_RD.t(), a_RF)
    del a_RF
    dh3_RF = da_RF * silu_RF
    dx_TD[rows].addmm_(dh3_RF, w3_FD)
    sums[2].addmm_(dh3_RF.t(), x_RD)
    del dh3_RF
    # silu'(h) = sigmoid(h) + silu(h) * (1 - sigmoid(h))
    dh1_RF = da_RF.mul_(h3_RF).mul_(silu_RF.mul_(1 - sigmoid_RF).add_(sigmoid_RF))
    dx_TD[rows].addmm_(dh1_RF, w1_FD)
    sums[0].addmm_(dh1_RF.t(), x_RD)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, g_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradients = _feed_forward_backward(g_TD.contiguous(), *ctx.saved_tensors)
    return (*gradients, None)[:5]


_feed_forward.register_autograd(_backward, setup_context=_setup_context)


def _chunks(x_TD: torch.Tensor, w1_FD: torch.Tensor) -> Iterator[slice]:
    num_tokens, dim = x_TD.shape
    least = _LEAST_CPU_ROWS if x_TD.device.type == "cpu" else _LEAST_DEVICE_ROWS
    length = max(least, num_tokens * dim // (_HIDDEN_COPIES * w1_FD.shape[0]))
    for start in range(0, num_tokens, length):
        yield slice(start, min(start + length, num_tokens))


def _first_chunk(x_TD: torch.Tensor, w1_FD: torch.Tensor) -> list[slice]:
    """For shape functions, since every chunk takes what the first does; none where there are no
    tokens, or a compiler traces with symbolic sizes."""
    if not isinstance(x_TD.shape[0], int):
        return []
    return list(itertools.islice(_chunks(x_TD, w1_FD), 1))
