"""Overrides of torchtitan's routed experts: the relay, and all-to-all in the run's own dtype.

Both keep torchtitan's parameter names and layouts, so checkpoints fit either.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive, override
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from titan_relay.moe import ExpertWeights, RelayOptions, relay_moe, relay_ring


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class NativeDtypeExperts(GroupedExperts):
    """Grouped experts that compute in their input's dtype.

    torchtitan's cast everything to bfloat16, also in a float32 run.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Apply expert e to its rows, which stand together and in the order of experts.

        On CPU experts run one after another: the grouped GEMM there is such a loop too.
        """
        weights = [local_part(w).to(x_RD.dtype) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)]
        if self.has_grouped_gemm(x_RD):
            return super().forward(x_RD, num_tokens_per_expert_E)
        rows = x_RD.split(self.rows_per_expert(x_RD.shape[0], num_tokens_per_expert_E))
        return torch.cat(
            [
                (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
                for x, w1, w2, w3 in zip(rows, *weights, strict=True)
            ]
        )

    def has_grouped_gemm(self, x_RD: torch.Tensor) -> bool:
        """Whether torch's grouped GEMM serves this device and dtype."""
        return x_RD.is_cuda and x_RD.dtype == torch.bfloat16

    def rows_per_expert(self, num_rows: int, counts_E: torch.Tensor) -> list[int]:
        """How many of the `num_rows` rows each expert has, read from the device."""
        rows: list[int] = counts_E.tolist()
        return rows


@override(target=GroupedExperts.Config, description="experts in the run's dtype")
def native_dtype_experts(config: GroupedExperts.Config) -> NativeDtypeExperts.Config:
    """Replace every grouped-experts config."""
    return derive(config, NativeDtypeExperts.Config)


class RelayRoutedExperts(RoutedExperts):
    """Routed experts that meet their tokens on the relay instead of through an all-to-all."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        options: RelayOptions = field(default_factory=RelayOptions)

    def __init__(self, config: Config):
        super().__init__(config)
        self.options = config.options
        self.group: dist.ProcessGroup | None = None

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Apply the experts to this rank's tokens; returns `(B, L, D)`.

        The relay counts tokens itself, `num_local_tokens_per_expert_E` is part of torchtitan's
        interface only.
        """
        experts = self.inner_experts
        weights = (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD)
        out_TD = relay_moe(
            x_BLD.flatten(0, 1),
            topk_scores_BLK.flatten(0, 1),
            topk_expert_ids_BLK.flatten(0, 1),
            ExpertWeights(*map(local_part, weights)),
            self.group,
            self.options,
        )
        return out_TD.view_as(x_BLD)

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Shard the experts over the EP mesh and make its ring."""
        super().parallelize(parallel_dims)
        ep_mesh = parallel_dims.get_optional_mesh("ep")
        if ep_mesh is not None:
            self.group = ep_mesh.get_group()
            relay_ring(self.group)

    def name_layer(self, name: str) -> None:
        """Name the layer in errors and telemetry."""
        self.options = replace(self.options, layer=name)


@override(target=RoutedExperts.Config, description="experts on the relay")
def relay_routed_experts(
    config: RoutedExperts.Config, *, options: RelayOptions
) -> RelayRoutedExperts.Config:
    """Replace every routed-experts config."""
    return derive(config, RelayRoutedExperts.Config, options=options)
