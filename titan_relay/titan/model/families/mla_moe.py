"""DeepSeek-V3 (arXiv:2412.19437) and its relatives, such as GLM-4.7-Flash and JoyAI-LLM-Flash:
multi-head latent attention, sigmoid routing whose bias steers the choice of experts only, shared
experts, and dense first layers. Without the multi-token-prediction layer, as in transformers.

Built from torchtitan's DeepSeek-V3 attention with its parameter names, so its Hugging Face adapter
applies.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.models.deepseek_v3.model import Attention
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.model.families import parts
from titan_relay.titan.model.families.decoder import RelayBlock, RelayDecoder

Adapter = DeepSeekV3StateDictAdapter


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


def build(model: ModelConfig, *, seed: int, cpu: bool) -> MLADecoder.Config:
    """The whole model's config from the numbers of `[model]`."""
    return MLADecoder.Config(
        init_seed=seed,
        dim=model.dim,
        vocab_size=model.vocab_size,
        enable_weight_tying=model.tie_word_embeddings,
        tok_embeddings=parts.embedding(model),
        layers=[
            _block(model, dense=layer < model.num_dense_layers, cpu=cpu)
            for layer in range(model.num_layers)
        ],
        norm=parts.rms_norm(model.dim, model.norm_eps),
        lm_head=parts.linear(model.dim, model.vocab_size, model.init_std),
    )


def _block(model: ModelConfig, *, dense: bool, cpu: bool) -> RelayBlock.Config:
    shared_dim = model.moe.shared_expert_dim
    return RelayBlock.Config(
        attention_norm=parts.rms_norm(model.dim, model.norm_eps),
        attention=_attention(model, cpu=cpu),
        ffn_norm=parts.rms_norm(model.dim, model.norm_eps),
        feed_forward=parts.feed_forward(model, model.dense_dim) if dense else None,
        moe=None
        if dense
        else parts.moe(
            model,
            shared_experts=parts.feed_forward(model, shared_dim) if shared_dim else None,
            has_expert_bias=True,
        ),
    )


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
