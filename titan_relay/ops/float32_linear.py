"""A linear layer in float32 for inputs of a narrower dtype, without a float32 copy of them.

Routers need it: which experts a token goes to is a comparison of close numbers.

Shape legend: R rows (all dimensions but the last), D input dimension, E output dimension.
"""

from typing import Any

import torch

from titan_relay.ops.row_chunks import fake_chunk, row_chunks, wide_dtype


def float32_linear(x: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """`x` (..., D) to (..., E) in float32 (float64 stays); gradients have their inputs' dtypes.

    Saved for backward: `x` and `weight_ED` themselves.
    """
    out: torch.Tensor = _float32_linear(x, weight_ED)
    return out


@torch.library.custom_op("titan_relay::float32_linear", mutates_args=())
def _float32_linear(x: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    wide = wide_dtype(x.dtype)
    wide_ED = weight_ED.to(wide)
    x_RD = x.reshape(-1, x.shape[-1])
    out_RE = torch.empty(x_RD.shape[0], wide_ED.shape[0], dtype=wide, device=x.device)
    for rows in row_chunks(len(x_RD), _row_bytes(x, weight_ED), x.device):
        torch.mm(x_RD[rows].to(wide), wide_ED.t(), out=out_RE[rows])
    return out_RE.view(*x.shape[:-1], -1)


@torch.library.custom_op("titan_relay::float32_linear_backward", mutates_args=())
def _float32_linear_backward(
    dy: torch.Tensor, x: torch.Tensor, weight_ED: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = wide_dtype(x.dtype)
    wide_ED = weight_ED.to(wide)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    x_RD, dx_RD, dy_RE = (t.reshape(-1, t.shape[-1]) for t in (x, dx, dy))
    dweight_ED = torch.zeros_like(wide_ED)
    for rows in row_chunks(len(x_RD), _row_bytes(x, weight_ED), x.device):
        dx_RD[rows] = dy_RE[rows] @ wide_ED
        dweight_ED.addmm_(dy_RE[rows].t(), x_RD[rows].to(wide))
    return dx, dweight_ED.to(weight_ED.dtype)


@_float32_linear.register_fake
def _(x: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(*x.shape[:-1], weight_ED.shape[0], dtype=wide_dtype(x.dtype))
    if out.dtype != x.dtype:
        fake_chunk(x, _row_bytes(x, weight_ED))
    return out


@_float32_linear_backward.register_fake
def _(
    dy: torch.Tensor, x: torch.Tensor, weight_ED: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight_ED = torch.empty_like(weight_ED, memory_format=torch.contiguous_format)
    fake_chunk(x, _row_bytes(x, weight_ED))
    return dx, dweight_ED


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dweight_ED = _float32_linear_backward(dy, *ctx.saved_tensors)
    return dx, dweight_ED


_float32_linear.register_autograd(_backward, setup_context=_setup_context)


def _row_bytes(x: torch.Tensor, weight_ED: torch.Tensor) -> int:
    """A chunk's rows in float32, and a product with as many columns as there are."""
    return sum(weight_ED.shape) * wide_dtype(x.dtype).itemsize
