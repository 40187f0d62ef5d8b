"""Qwen3 MoE (arXiv:2505.09388): GQA with per-head QK-norm, softmax top-k routing, no shared expert.

Built from torchtitan's blocks with its parameter names, so its Hugging Face adapter applies.
"""

from __future__ import annotations

from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.model.families import architecture, parts
from titan_relay.titan.model.families.decoder import RelayDecoder
from titan_relay.titan.model.families.family import Family


def build(model: ModelConfig, *, seed: int, cpu: bool) -> RelayDecoder.Config:
    """The whole model's config from the numbers of `[model]`."""
    return parts.decoder(
        model,
        seed=seed,
        layer=lambda _: parts.block(
            model, parts.gqa(model, cpu=cpu, qk_norm=True), moe=parts.moe(model)
        ),
    )


FAMILY = Family(
    build=build,
    adapter=Qwen3StateDictAdapter,
    architectures=(
        architecture.Architecture(
            model_type="qwen3_moe",
            class_name="Qwen3MoeForCausalLM",
            keys=(*architecture.GQA, *architecture.QWEN_EXPERTS),
            fixed=architecture.SOFTMAX,
            only=architecture.QWEN_PLAIN | {"attention_bias": (False,)},
        ),
    ),
    needs=("model.num_kv_heads", "model.head_dim"),
)
