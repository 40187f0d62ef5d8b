"""DeepSeek-V3 (arXiv:2412.19437) and its relatives, such as GLM-4.7-Flash and JoyAI-LLM-Flash:
multi-head latent attention, sigmoid routing whose bias steers the choice of experts only, shared
experts, and dense first layers. Without the multi-token-prediction layer, as in transformers.

Built from torchtitan's DeepSeek-V3 attention with its parameter names, so its Hugging Face adapter
applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.models.deepseek_v3.model import Attention
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.model.families import architecture, parts
from titan_relay.titan.model.families.architecture import Architecture, HfKey
from titan_relay.titan.model.families.decoder import RelayBlock, RelayDecoder
from titan_relay.titan.model.families.family import Family


class MLADecoder(RelayDecoder):
    """A decoder with latent attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(RelayDecoder.Config):
        mtp_layers: tuple[()] = ()  # torchtitan's sharding asks for them

        def shard(self, *, enable_sp: bool, enable_ep: bool) -> None:
            """Say how tensor and expert parallelism lay out every module of this config."""
            set_deepseek_v3_sharding_config(self, enable_sp=enable_sp, enable_ep=enable_ep)

        def head_dims(self) -> int:
            """Width of a query plus width of a value."""
            attention = self.layers[0].attention
            assert isinstance(attention, Attention.Config)
            return attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim


def build(model: ModelConfig, *, seed: int, cpu: bool) -> RelayDecoder.Config:
    """The whole model's config from the numbers of `[model]`."""
    return parts.decoder(
        model,
        seed=seed,
        layer=lambda index: _block(model, dense=index < model.num_dense_layers, cpu=cpu),
        kind=MLADecoder.Config,
    )


def _block(model: ModelConfig, *, dense: bool, cpu: bool) -> RelayBlock.Config:
    attention, shared_dim = _attention(model, cpu=cpu), model.moe.shared_expert_dim
    if dense:
        feed_forward = parts.feed_forward(model, model.dense_dim)
        return parts.block(model, attention, feed_forward=feed_forward)
    shared = parts.feed_forward(model, shared_dim) if shared_dim else None
    moe = parts.moe(model, shared_experts=shared, has_expert_bias=True)
    return parts.block(model, attention, moe=moe)


def _attention(model: ModelConfig, *, cpu: bool) -> Attention.Config:
    mla, heads, std = model.mla, model.num_heads, model.init_std
    queries_dim = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    low_rank = mla.q_lora_rank > 0
    return Attention.Config(
        dim=model.dim,
        n_heads=heads,
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_nope_head_dim=mla.qk_nope_head_dim,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        wq=None if low_rank else parts.linear(model.dim, queries_dim, std),
        wq_a=parts.linear(model.dim, mla.q_lora_rank, std) if low_rank else None,
        wq_b=parts.linear(mla.q_lora_rank, queries_dim, std) if low_rank else None,
        q_norm=_latent_norm(model, mla.q_lora_rank),
        wkv_a=parts.linear(model.dim, mla.kv_lora_rank + mla.qk_rope_head_dim, std),
        kv_norm=_latent_norm(model, mla.kv_lora_rank),
        wkv_b=parts.linear(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim), std),
        wo=parts.linear(heads * mla.v_head_dim, model.dim, parts.residual_std(model)),
        inner_attention=parts.inner_attention(model, cpu=cpu),
        # Neighbouring dims make a pair, where other families rotate the halves of a head.
        rope=ComplexRoPE.Config(
            dim=mla.qk_rope_head_dim, max_seq_len=model.max_seq_len, theta=model.rope_theta
        ),
    )


def _latent_norm(model: ModelConfig, dim: int) -> RMSNorm.Config:
    return parts.rms_norm(dim, model.mla.latent_norm_eps)


def _dense_layers(value: Any, config: Mapping[str, Any]) -> int:
    """A number of leading layers, or the kind of each layer."""
    if isinstance(value, int):
        return value
    kinds = list(value)
    count = kinds.count("dense")
    if kinds != ["dense"] * count + ["sparse"] * (len(kinds) - count):
        raise ValueError("family mla_moe has its dense layers first")
    return count


def _dense_dim(value: Any, config: Mapping[str, Any]) -> int:
    kinds = config.get("mlp_layer_types")
    has_dense = "dense" in kinds if kinds else config.get("first_k_dense_replace", 1)
    return int(value) if has_dense else 0


_KEYS = (
    *architecture.SHARED,
    # A model without dense layers still has to say a width.
    HfKey(
        "dense_dim",
        ("intermediate_size",),
        read=_dense_dim,
        write=lambda model: model.dense_dim or model.moe.expert_dim,
    ),
    HfKey(
        "mla.q_lora_rank",
        ("q_lora_rank",),
        default=0,
        write=lambda model: model.mla.q_lora_rank or None,
    ),
    HfKey("mla.kv_lora_rank", ("kv_lora_rank",)),
    HfKey("mla.qk_nope_head_dim", ("qk_nope_head_dim",)),
    HfKey("mla.qk_rope_head_dim", ("qk_rope_head_dim",)),
    HfKey("mla.v_head_dim", ("v_head_dim",)),
    *architecture.DEEPSEEK_EXPERTS,
)
_FIXED = {
    "moe.score_func": "sigmoid",
    "mla.latent_norm_eps": 1e-6,  # a constant in both classes
    "num_kv_heads": 0,
    "head_dim": 0,
}
_ONLY: dict[str, tuple[Any, ...]] = {
    **architecture.PLAIN,
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "rope_interleave": (True, None),
    "attention_bias": (False,),
}
_DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    keys=(*_KEYS, HfKey("num_dense_layers", ("first_k_dense_replace",))),
    fixed=_FIXED,
    only=_ONLY,
    extra=lambda model: {
        "num_key_value_heads": model.num_heads,
        "num_nextn_predict_layers": 0,  # the class's default is 1
    },
)
_GLM4_MOE_LITE = Architecture(
    model_type="glm4_moe_lite",
    class_name="Glm4MoeLiteForCausalLM",
    keys=(
        *_KEYS,
        HfKey(
            "num_dense_layers",
            ("mlp_layer_types", "first_k_dense_replace"),
            default=1,
            read=_dense_layers,
        ),
    ),
    fixed=_FIXED,
    only=_ONLY,
)


class MlaAdapter(DeepSeekV3StateDictAdapter):
    """torchtitan's, for tied models too: their folders have no head of its own."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our names to Hugging Face's."""
        theirs: dict[str, Any] = super().to_hf(state_dict)
        if self.model_config.enable_weight_tying:
            theirs.pop("lm_head.weight", None)
        return theirs

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hugging Face's names to ours."""
        if self.model_config.enable_weight_tying:
            embedding = hf_state_dict["model.embed_tokens.weight"]
            hf_state_dict = {"lm_head.weight": embedding, **hf_state_dict}
        ours: dict[str, Any] = super().from_hf(hf_state_dict)
        return ours


FAMILY = Family(
    build=build,
    adapter=MlaAdapter,
    architectures=(_DEEPSEEK_V3, _GLM4_MOE_LITE),
    needs=(
        "model.mla.kv_lora_rank",
        "model.mla.qk_nope_head_dim",
        "model.mla.qk_rope_head_dim",
        "model.mla.v_head_dim",
    ),
    may_have=(
        "model.num_dense_layers",
        "model.dense_dim",
        "model.moe.shared_expert_dim",
        "model.moe.num_expert_groups",
        "model.moe.num_limited_groups",
        "model.mla.q_lora_rank",
        "model.mla.latent_norm_eps",
    ),
)
