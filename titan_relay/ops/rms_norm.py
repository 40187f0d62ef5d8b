"""RMSNorm that saves its input and nothing else, and makes no float32 copy of it.

y = x * rsqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467), computed in
float32. With n = x * rsqrt(...) and g = dy * weight:
dx = rsqrt(...) * (g - n * mean(g * n)), dweight = sum over rows of dy * n.

Shape legend: R rows (all dimensions but the last), D the last dimension.
"""

from typing import Any

import torch
import torch.nn.functional as F

from titan_relay.ops.row_chunks import fake_chunk, row_chunks, wide_dtype

# Float32 rows that a chunk's arithmetic has at a time.
_FORWARD_COPIES = 2
_BACKWARD_COPIES = 3


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise `x` (..., D); result and gradients have the dtypes of their inputs.

    Saved for backward: `x` and `weight_D` themselves.
    """
    out: torch.Tensor = _rms_norm(x, weight_D, eps)
    return out


@torch.library.custom_op("titan_relay::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    if not x.is_cpu:
        return F.rms_norm(x, weight_D.shape, weight_D, eps).contiguous()  # one fused kernel
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x_RD, out_RD = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    weight_D = weight_D.to(wide_dtype(x.dtype))
    for rows in row_chunks(len(x_RD), _row_bytes(x, _FORWARD_COPIES), x.device):
        n_RD, _ = _normalised(x_RD[rows], eps)
        out_RD[rows] = n_RD.mul_(weight_D)
    return out


@torch.library.custom_op("titan_relay::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dim = x.shape[-1]
    x_RD, dy_RD, dx_RD = x.reshape(-1, dim), dy.reshape(-1, dim), dx.view(-1, dim)
    wide_D = weight_D.to(wide_dtype(x.dtype))
    dweight_D = torch.zeros_like(wide_D)
    for rows in row_chunks(len(x_RD), _row_bytes(x, _BACKWARD_COPIES), x.device):
        n_RD, scale_R1 = _normalised(x_RD[rows], eps)
        g_RD = dy_RD[rows].to(n_RD.dtype)
        dweight_D += (g_RD * n_RD).sum(dim=0)
        g_RD = g_RD * wide_D
        mean_R1 = (g_RD * n_RD).mean(dim=-1, keepdim=True)
        dx_RD[rows] = n_RD.mul_(mean_R1).neg_().add_(g_RD).mul_(scale_R1)
    return dx, dweight_D.to(weight_D.dtype)


@_rms_norm.register_fake
def _(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    fake_chunk(x, _row_bytes(x, _FORWARD_COPIES))
    return out


@_rms_norm_backward.register_fake
def _(
    dy: torch.Tensor, x: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight_D = torch.empty_like(weight_D, memory_format=torch.contiguous_format)
    fake_chunk(x, _row_bytes(x, _BACKWARD_COPIES))
    return dx, dweight_D


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight_D, ctx.eps = inputs
    ctx.save_for_backward(x, weight_D)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight_D = ctx.saved_tensors
    dx, dweight_D = _rms_norm_backward(dy, x, weight_D, ctx.eps)
    return dx, dweight_D, None


_rms_norm.register_autograd(_backward, setup_context=_setup_context)


def _normalised(x_RD: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A fresh copy of the rows in float32, normalised, and what each was multiplied by."""
    wide_RD = x_RD.to(wide_dtype(x_RD.dtype), copy=True)
    scale_R1 = wide_RD.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    return wide_RD.mul_(scale_R1), scale_R1


def _row_bytes(x: torch.Tensor, num_copies: int) -> int:
    return num_copies * x.shape[-1] * wide_dtype(x.dtype).itemsize
