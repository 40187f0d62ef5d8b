"""Overrides of torchtitan's routed experts: the relay, and all-to-all in the run's own dtype.

Both keep torchtitan's parameter names and layouts, so checkpoints fit either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import GroupedExperts


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class NativeDtypeExperts(GroupedExperts):
    """Grouped experts that compute in their input's dtype.

    torchtitan's cast everything to bfloat16, also in a float32 run.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(
        self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor
    ) -> torch.Tensor:
        """Apply expert e to its rows, which stand together and in the order of experts.

        On CPU experts run one after another: the grouped GEMM there is such a loop too.
        """
        weights = [_local(w).to(x_RD.dtype) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)]
        if x_RD.is_cuda and x_RD.dtype == torch.bfloat16:
            return super().forward(x_RD, num_tokens_per_expert_E)
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        return torch.cat(
            [
                (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
                for x, w1, w2, w3 in zip(rows, *weights, strict=True)
            ]
        )


@override(target=GroupedExperts.Config, description="experts in the run's dtype")
def native_dtype_experts(config: GroupedExperts.Config) -> NativeDtypeExperts.Config:
    """Replace every grouped-experts config."""
    return derive(config, NativeDtypeExperts.Config)
