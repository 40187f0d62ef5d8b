"""Qwen2 MoE (arXiv:2407.10671): GQA with biases on q, k and v, softmax top-k routing without
renormalisation, and one shared expert behind a sigmoid gate.
"""

from __future__ import annotations

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.model.families import adapter, architecture, parts
from titan_relay.titan.model.families.architecture import HfKey
from titan_relay.titan.model.families.decoder import RelayDecoder
from titan_relay.titan.model.families.family import Family


class Adapter(adapter.Adapter):
    """Qwen3's names, and those of biases and of the shared expert."""

    names = adapter.QKV_BIASES | adapter.layer_names(
        {
            "mlp.shared_expert.gate_proj.weight": "moe.shared_experts.w1.weight",
            "mlp.shared_expert.up_proj.weight": "moe.shared_experts.w3.weight",
            "mlp.shared_expert.down_proj.weight": "moe.shared_experts.w2.weight",
            "mlp.shared_expert_gate.weight": "moe.shared_experts.gate.weight",
        }
    )


def build(model: ModelConfig, *, seed: int, cpu: bool) -> RelayDecoder.Config:
    """The whole model's config from the numbers of `[model]`."""
    return parts.decoder(
        model,
        seed=seed,
        layer=lambda _: parts.block(
            model,
            parts.gqa(model, cpu=cpu, qkv_bias=True),
            moe=parts.moe(model, shared_experts=parts.gated_feed_forward(model)),
        ),
    )


FAMILY = Family(
    build=build,
    adapter=Adapter,
    architectures=(
        architecture.Architecture(
            model_type="qwen2_moe",
            class_name="Qwen2MoeForCausalLM",
            keys=(
                *architecture.GQA,
                *architecture.QWEN_EXPERTS,
                HfKey("moe.shared_expert_dim", ("shared_expert_intermediate_size",)),
            ),
            fixed=architecture.SOFTMAX,
            only=architecture.QWEN_PLAIN | {"qkv_bias": (True,)},
        ),
    ),
    needs=("model.num_kv_heads", "model.head_dim", "model.moe.shared_expert_dim"),
)
