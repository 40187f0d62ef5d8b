"""Phi-3.5-MoE (arXiv:2404.14219): LayerNorms and projections with biases, LongRoPE, two experts per
token chosen by SparseMixer.
"""

from __future__ import annotations

from torchtitan.models.common.rope import RoPE

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.families import adapter, parts
from titan_relay.titan.families.decoder import RelayBlock, RelayDecoder
from titan_relay.titan.families.longrope import LongRoPE
from titan_relay.titan.sparsemixer import SparseMixerRouter


class Adapter(adapter.Adapter):
    """Mixtral's spelling, and the names of the biases."""

    spelling = adapter.BLOCK_SPARSE
    names = (
        adapter.QKV_BIASES
        | adapter.layer_names(
            {
                "self_attn.o_proj.bias": "attention.wo.bias",
                "input_layernorm.bias": "attention_norm.bias",
                "post_attention_layernorm.bias": "ffn_norm.bias",
            }
        )
        | {"model.norm.bias": "norm.bias", "lm_head.bias": "lm_head.bias"}
    )


def build(model: ModelConfig, *, seed: int, cpu: bool) -> RelayDecoder.Config:
    """The whole model's config from the numbers of `[model]`."""
    return parts.decoder(
        model,
        seed=seed,
        layer=lambda: _block(model, cpu=cpu),
        norm=parts.layer_norm,
        head_bias=True,
    )


def _block(model: ModelConfig, *, cpu: bool) -> RelayBlock.Config:
    return RelayBlock.Config(
        attention_norm=parts.layer_norm(model.dim, model.norm_eps),
        attention=parts.gqa(model, cpu=cpu, qkv_bias=True, out_bias=True, rope_config=_rope(model)),
        ffn_norm=parts.layer_norm(model.dim, model.norm_eps),
        moe=parts.moe(model, router_config=_router(model)),
    )


def _router(model: ModelConfig) -> SparseMixerRouter.Config:
    moe = model.moe
    return SparseMixerRouter.Config(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        score_func="softmax",  # of the probabilities that balancing losses look at
        route_scale=moe.route_scale,
        jitter=moe.router_jitter,
        gate=parts.gate(model),
    )


def _rope(model: ModelConfig) -> RoPE.Config:
    numbers = model.longrope
    if not numbers.original_max_seq_len:
        return parts.rope(model)
    return LongRoPE.Config(
        dim=model.head_dim,
        max_seq_len=model.max_seq_len,
        theta=model.rope_theta,
        original_max_seq_len=numbers.original_max_seq_len,
        short_factor=numbers.short_factor,
        long_factor=numbers.long_factor,
        short_mscale=numbers.short_mscale,
        long_mscale=numbers.long_mscale,
    )
