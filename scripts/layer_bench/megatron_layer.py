"""Megatron-Core's ``MoELayer`` with its all-to-all dispatcher.

What a CPU run has to adapt, and nothing else:

- its dispatcher makes a CUDA stream and copies the split sizes to the host on it; on CPU they are
  on the host already, so the copies become plain conversions;
- it makes tensors on ``torch.cuda.current_device()``, which becomes "cpu";
- its fused activations are compiled by ``torch.compile``; ``disable_jit_fuser`` must come first,
  because a compiled function would measure the compiler (CPU, no C++ toolchain assumed);
- its grouped experts need a CUDA package (``megatron-grouped`` stands in for them: the same layer,
  with experts over ``torch._grouped_mm``), and so does Transformer Engine;
- without either, experts are its ``SequentialMLP``: one after the other, eager.

The router is replaced by one that returns the given routing, in the dense form that Megatron's
router gives: probabilities and a mask over tokens and experts.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from layer_bench.layer import Layer, grads_of
from layer_bench.setting import Setting


def megatron_layer(name: str, setting: Setting, group: dist.ProcessGroup) -> Layer:
    from megatron.core import jit

    if setting.device == "cpu":
        jit.disable_jit_fuser()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    if setting.device == "cpu":
        _adapt_dispatcher_to_cpu()
    rank = dist.get_rank(group)
    alone, _ = dist.new_subgroups(1, group)  # for the axes that the benchmark does not use
    groups = ProcessGroupCollection()
    for axis in ("tp", "cp", "expt_tp", "expt_dp", "tp_cp", "tp_dp_cp"):
        setattr(groups, axis, alone)
    groups.ep = groups.tp_ep = group
    experts = ModuleSpec(
        module=SequentialMLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    layer: Any = MoELayer(
        _config(setting),
        submodules=MoESubmodules(experts=experts, router=_GivenRouter),
        pg_collection=groups,
    )
    w1_eFD, w2_eDF, w3_eFD = setting.weights(rank)
    if name == "megatron-grouped":
        layer.experts = _GroupedExperts(torch.cat([w1_eFD, w3_eFD], 1), w2_eDF)
    else:
        with torch.no_grad():
            for index, expert in enumerate(layer.experts.local_experts):
                expert.linear_fc1.weight.copy_(torch.cat([w1_eFD[index], w3_eFD[index]]))
                expert.linear_fc2.weight.copy_(w2_eDF[index])
    parameters = list(layer.parameters())

    def forward(x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        layer.router.routing = (scores_TK, ids_TK)
        output, _ = layer(x_TD[:, None])
        return output[:, 0]

    def weight_gradients() -> list[torch.Tensor]:
        if name == "megatron-grouped":
            fc1, fc2 = grads_of(parameters)
        else:
            experts = layer.experts.local_experts
            fc1 = torch.stack(grads_of([expert.linear_fc1.weight for expert in experts]))
            fc2 = torch.stack(grads_of([expert.linear_fc2.weight for expert in experts]))
        return [fc1[:, : setting.expert_dim], fc2, fc1[:, setting.expert_dim :]]

    return Layer(name, forward, parameters, weight_gradients, keep=[layer, groups])


class _GivenRouter(torch.nn.Module):
    """Returns the routing it was given last."""

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__()
        self.num_experts = config.num_moe_experts
        self.routing: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.routing is not None
        scores_TK, ids_TK = self.routing
        empty_TE = scores_TK.new_zeros(scores_TK.shape[0], self.num_experts)
        mask_TE = torch.zeros_like(empty_TE, dtype=torch.bool).scatter(1, ids_TK, True)
        return empty_TE.scatter(1, ids_TK, scores_TK), mask_TE

    def set_layer_number(self, layer_number: int) -> None:
        pass


class _GroupedExperts(torch.nn.Module):
    """Megatron's grouped experts (fused gate and up, probabilities after the activation)."""

    def __init__(self, fc1_eHD: torch.Tensor, fc2_eDF: torch.Tensor) -> None:
        super().__init__()
        self.fc1_eHD = torch.nn.Parameter(fc1_eHD)
        self.fc2_eDF = torch.nn.Parameter(fc2_eDF)

    def forward(
        self, rows_RD: torch.Tensor, tokens_per_expert: torch.Tensor, probs_R: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        offsets = torch.cumsum(tokens_per_expert, 0, dtype=torch.int32).to(rows_RD.device)
        hidden = torch._grouped_mm(rows_RD, self.fc1_eHD.transpose(-2, -1), offs=offsets)
        gate, up = hidden.chunk(2, dim=-1)
        activated = (F.silu(gate) * up * probs_R[:, None]).to(rows_RD.dtype)
        return torch._grouped_mm(activated, self.fc2_eDF.transpose(-2, -1), offs=offsets), None


def _config(setting: Setting) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=setting.dim,
        num_attention_heads=1,
        ffn_hidden_size=setting.expert_dim,
        moe_ffn_hidden_size=setting.expert_dim,
        num_moe_experts=setting.experts,
        moe_router_topk=setting.top_k,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=setting.ep,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        params_dtype=setting.dtype,
        bf16=setting.dtype == torch.bfloat16,
        use_cpu_initialization=setting.device == "cpu",
        gradient_accumulation_fusion=False,
    )


def _adapt_dispatcher_to_cpu() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    dispatcher: Any = MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = "no stream on CPU"

    def convert(
        self: Any, point: str, tokens_per_expert: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                value = getattr(self, name)
                if isinstance(value, torch.Tensor):
                    setattr(self, name, value.numpy())
        return tokens_per_expert

    dispatcher._maybe_dtoh_and_synchronize = convert
