"""torchtitan's norms, rotary embeddings and feed-forwards on low-memory ops of this project.

Same configs, parameters and results; they differ in what they save for backward and copy on the
way. Under tensor parallelism tensors are DTensors, which registered ops do not take: there
torchtitan's own code runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common import attention, nn_modules, rope
from torchtitan.models.common import feed_forward as titan_feed_forward

from titan_relay.ops import feed_forward, rms_norm
from titan_relay.ops import rope as rotated
from titan_relay.recompute.retained import rebuilt


class RMSNorm(nn_modules.RMSNorm):
    """Saves its input, and makes no float32 copy of it."""

    @dataclass(kw_only=True, slots=True)
    class Config(nn_modules.RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`."""
        if isinstance(x, DTensor) or self.weight is None or isinstance(self.weight, DTensor):
            return super().forward(x)
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class CosSinRoPE(rope.CosSinRoPE):
    """Saves positions only, and makes no float32 copies of queries and keys."""

    @dataclass(kw_only=True, slots=True)
    class Config(rope.CosSinRoPE.Config):
        pass

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys `(B, L, N, H)`; positions `(B, L)`, counted from 0 if None."""
        if isinstance(query, DTensor) or isinstance(self.cache, DTensor):
            return super().forward(query, key, positions)
        if positions is None:
            positions = torch.arange(query.shape[1], device=query.device)[None]
        table = self.cache
        return rotated(query, table, positions), rotated(key, table, positions)


class GQAttention(attention.GQAttention):
    """Does not hold normalised and rotated queries and keys from a recompute to their backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(attention.GQAttention.Config):
        pass

    def forward(
        self,
        x_BLD: torch.Tensor,
        attention_masks: attention.AttentionMasksType | None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply attention; `x_BLD` is normalised already."""
        q_BLNH, k_BLNH, v_BLNH = self.qkv_linear(x_BLD)

        if positions is None:
            positions = torch.arange(x_BLD.shape[1], device=x_BLD.device)[None]
        q_BLNH, k_BLNH = rebuilt(self._norm_and_rotate, q_BLNH, k_BLNH, positions)
        out_BLNH = self.inner_attention(
            q_BLNH,
            k_BLNH,
            v_BLNH,
            attention_masks=attention_masks,
            scale=self.scaling,
            enable_gqa=self.enable_gqa,
        )
        out_BLD: torch.Tensor = self.wo(out_BLNH.contiguous().flatten(2))
        return out_BLD

    def _norm_and_rotate(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLNH = self.q_norm(q_BLNH), self.k_norm(k_BLNH)
        turned: tuple[torch.Tensor, torch.Tensor] = self.rope(q_BLNH, k_BLNH, positions)
        return turned


class FeedForward(titan_feed_forward.FeedForward):
    """Computed in chunks of rows; saves its input only."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan_feed_forward.FeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x` `(..., D)`."""
        if _is_plain(self, x):
            return _apply(self, x, None)
        return super().forward(x)


class SigmoidGatedFeedForward(titan_feed_forward.SigmoidGatedFeedForward):
    """The same, times a gate for each token."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan_feed_forward.SigmoidGatedFeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x` `(..., D)`."""
        if _is_plain(self, x) and self.gate.bias is None:
            return _apply(self, x, self.gate.weight)
        return super().forward(x)


def _is_plain(module: titan_feed_forward.FeedForward, x: torch.Tensor) -> bool:
    weights = [x, *module.parameters()]
    has_bias = any(linear.bias is not None for linear in (module.w1, module.w2, module.w3))
    return not has_bias and not any(isinstance(each, DTensor) for each in weights)


def _apply(
    module: titan_feed_forward.FeedForward, x: torch.Tensor, gate: torch.Tensor | None
) -> torch.Tensor:
    weights = (module.w1.weight, module.w2.weight, module.w3.weight)
    out_TD = feed_forward(x.reshape(-1, x.shape[-1]), *weights, gate)
    return out_TD.view(x.shape)
