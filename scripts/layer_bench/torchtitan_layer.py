"""torchtitan's routed experts: its all-to-all dispatcher and its grouped experts.

``torchtitan-stock`` is untouched: its experts compute in bfloat16 whatever the model's dtype is.
``torchtitan`` runs the same operations in the run's dtype, so that like is compared with like.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from layer_bench.layer import Layer, grads_of
from layer_bench.setting import Setting


def torchtitan_layer(name: str, setting: Setting, group: dist.ProcessGroup) -> Layer:
    _prepare(setting.device)
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    class SameDtypeExperts(GroupedExperts):
        """Grouped experts without the casts to bfloat16."""

        def forward(
            self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor
        ) -> torch.Tensor:
            offsets_E = torch.cumsum(num_tokens_per_expert_E, 0, dtype=torch.int32)

            def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=offsets_E)

            hidden = F.silu(product(x_RD, self.w1_EFD)) * product(x_RD, self.w3_EFD)
            return product(hidden, self.w2_EDF)

    # Parameters are this rank's experts alone, as after torchtitan's own sharding.
    experts = GroupedExperts.Config(
        dim=setting.dim, hidden_dim=setting.expert_dim, num_experts=setting.local_experts
    )
    dispatcher = AllToAllTokenDispatcher.Config(num_experts=setting.experts, top_k=setting.top_k)
    routed = RoutedExperts(RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher))
    if name != "torchtitan-stock":
        routed.inner_experts = SameDtypeExperts(experts)
    routed = routed.to(setting.device, setting.dtype)
    parameters = [routed.inner_experts.w1_EFD, routed.inner_experts.w2_EDF]
    parameters.append(routed.inner_experts.w3_EFD)
    with torch.no_grad():
        for parameter, weight in zip(
            parameters, setting.weights(dist.get_rank(group)), strict=True
        ):
            parameter.copy_(weight)
    if setting.ep > 1:
        mesh = DeviceMesh.from_group(group, setting.device, mesh_dim_names=("ep",))
        routed.token_dispatcher.wire_meshes(ep_mesh=mesh)

    def forward(x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        counts_E = torch.bincount(ids_TK.view(-1), minlength=setting.experts)
        out_BLD = routed(x_TD[None], scores_TK[None], ids_TK[None], counts_E)
        return out_BLD.view_as(x_TD)

    return Layer(name, forward, parameters, lambda: grads_of(parameters), keep=[routed])


def _prepare(device: str) -> None:
    """Choose plain tensors, the backend whose dispatcher needs no type system at run time."""
    from titan_relay.titan.private_torchtitan import adapt_torchtitan

    adapt_torchtitan(cpu=device == "cpu")
    from torchtitan.distributed import utils

    utils._spmd_backend = "partial_dtensor"
