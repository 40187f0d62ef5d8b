"""The gated activation between an expert's two projections, forward and backward, in place.

Shape legend: R rows of one step, F expert hidden dimension.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SwiGLU:
    """``a = g * sigmoid(alpha * g) * (u + up_offset)`` with ``g = min(h1, limit)`` and
    ``u = clamp(h3, -limit, limit)``.

    The defaults are the SwiGLU of Qwen, Mixtral and DeepSeek, ``silu(h1) * h3``.
    ``SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0)`` is the clamped one of gpt-oss.
    """

    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if not self.alpha > 0.0:
            raise ValueError(f"SwiGLU: alpha = {self.alpha} must be greater than 0")
        if not self.limit > 0.0:
            raise ValueError(f"SwiGLU: limit = {self.limit} must be greater than 0")

    @property
    def is_clamped(self) -> bool:
        return math.isfinite(self.limit)


def activate_(h1_RF: torch.Tensor, h3_RF: torch.Tensor, activation: SwiGLU) -> torch.Tensor:
    """Overwrite ``h1_RF`` with the activation's value and return it; ``h3_RF`` is scratch after."""
    _clamp_inputs_(h1_RF, h3_RF, activation)
    _gate_(h1_RF, activation, out_RF=h1_RF)
    return h1_RF.mul_(h3_RF)


def activate_for_backward_(
    h1_RF: torch.Tensor,
    h3_RF: torch.Tensor,
    gate_RF: torch.Tensor,
    a_RF: torch.Tensor,
    cut1_RF: torch.Tensor,
    cut3_RF: torch.Tensor,
    activation: SwiGLU,
) -> None:
    """Rebuild what the backward needs.

    Afterwards ``gate_RF`` is the gate, ``a_RF`` the activation's value, ``h1_RF`` the gate's
    argument (times ``alpha``) and ``h3_RF`` the clamped and shifted up projection. With a limit
    ``cut1_RF`` and ``cut3_RF`` say which elements the clamps cut off: their gradient is zero.
    """
    if activation.is_clamped:
        torch.gt(h1_RF, activation.limit, out=cut1_RF)
        torch.gt(torch.abs(h3_RF, out=a_RF), activation.limit, out=cut3_RF)
    _clamp_inputs_(h1_RF, h3_RF, activation)
    _gate_(h1_RF, activation, out_RF=gate_RF)
    torch.mul(gate_RF, h3_RF, out=a_RF)


def _clamp_inputs_(h1_RF: torch.Tensor, h3_RF: torch.Tensor, activation: SwiGLU) -> None:
    if activation.is_clamped:
        h1_RF.clamp_(max=activation.limit)
        h3_RF.clamp_(min=-activation.limit, max=activation.limit)
    if activation.up_offset != 0.0:
        h3_RF.add_(activation.up_offset)


def _gate_(h1_RF: torch.Tensor, activation: SwiGLU, *, out_RF: torch.Tensor) -> None:
    # g * sigmoid(alpha g) = silu(alpha g) / alpha, so that one fused silu serves every alpha and
    # its derivative in g is silu'(alpha g).
    if activation.alpha == 1.0:
        torch.ops.aten.silu.out(h1_RF, out=out_RF)
        return
    h1_RF.mul_(activation.alpha)
    torch.ops.aten.silu.out(h1_RF, out=out_RF)
    out_RF.div_(activation.alpha)
