"""Phi-3.5-MoE (arXiv:2404.14219): LayerNorms and projections with biases, LongRoPE
(arXiv:2402.13753), two experts per token chosen by SparseMixer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common.rope import RoPE

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.model.families import adapter, architecture, parts
from titan_relay.titan.model.families.architecture import HfKey
from titan_relay.titan.model.families.decoder import RelayDecoder
from titan_relay.titan.model.families.family import Family
from titan_relay.titan.model.low_memory import CosSinRoPE
from titan_relay.titan.model.sparsemixer import SparseMixerRouter


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
        layer=lambda _: parts.block(
            model,
            parts.gqa(model, cpu=cpu, qkv_bias=True, out_bias=True, rope_config=_rope(model)),
            moe=parts.moe(model, router_config=_router(model)),
            norm=parts.layer_norm,
        ),
        norm=parts.layer_norm,
        head_bias=True,
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


class LongRoPE(CosSinRoPE):
    """Rotary embeddings whose wavelengths are stretched and whose result is scaled.

    There is one list of factors for short sequences and one for long ones. Which applies follows
    from the length that the model is run for: torchtitan sets `max_seq_len` to `training.seq_len`.
    So all ranks and all steps of a run use the same one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        original_max_seq_len: int
        short_factor: tuple[float, ...]
        long_factor: tuple[float, ...]
        short_mscale: float
        long_mscale: float

    def _precompute_cache(self) -> torch.Tensor:
        """Cosines and sines of every position: float32 `(max_seq_len, 2 * dim)`."""
        config = self.config
        assert isinstance(config, LongRoPE.Config)
        long = config.max_seq_len > config.original_max_seq_len
        factor = torch.tensor(config.long_factor if long else config.short_factor)
        mscale = config.long_mscale if long else config.short_mscale
        exponent = torch.arange(0, config.dim, 2).float() / config.dim
        frequency = 1.0 / (factor * config.theta**exponent)
        angle = torch.outer(torch.arange(config.max_seq_len).float(), frequency)
        angle = torch.cat([angle, angle], dim=-1)
        return torch.cat([angle.cos(), angle.sin()], dim=-1) * mscale


def _if_longrope(value: Any, config: Mapping[str, Any]) -> int:
    return int(value) if config["rope_type"] == "longrope" else 0


def _floats(value: Any, config: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(float(each) for each in value)


def _rope_parameters(model: ModelConfig) -> dict[str, Any]:
    """LongRoPE, where the model has it."""
    numbers = model.longrope
    if not numbers.original_max_seq_len:
        return architecture.plain_rope(model)
    return {
        "rope_type": "longrope",
        "rope_theta": model.rope_theta,
        "original_max_position_embeddings": numbers.original_max_seq_len,
        "short_factor": list(numbers.short_factor),
        "long_factor": list(numbers.long_factor),
        "short_mscale": numbers.short_mscale,
        "long_mscale": numbers.long_mscale,
    }


FAMILY = Family(
    build=build,
    adapter=Adapter,
    architectures=(
        architecture.Architecture(
            model_type="phimoe",
            class_name="PhimoeForCausalLM",
            keys=(
                *architecture.GQA,
                *architecture.LOCAL_EXPERTS,
                HfKey("moe.router_jitter", ("router_jitter_noise",)),
                HfKey("moe.input_jitter", ("input_jitter_noise",), default=0.0, choice=True),
                HfKey(
                    "longrope.original_max_seq_len",
                    ("original_max_position_embeddings",),
                    default=0,
                    read=_if_longrope,
                    in_rope=True,
                ),
                *(
                    HfKey(f"longrope.{name}", (name,), default=(), read=_floats, in_rope=True)
                    for name in ("short_factor", "long_factor")
                ),
                *(
                    HfKey(f"longrope.{name}", (name,), default=1.0, in_rope=True)
                    for name in ("short_mscale", "long_mscale")
                ),
            ),
            fixed={
                "moe.score_func": "sparsemixer",
                "moe.route_norm": False,
                "moe.route_scale": 1.0,
            },
            only={
                **architecture.PLAIN,
                "rope_type": ("default", "longrope"),
                "attention_bias": (True,),
                "lm_head_bias": (True,),
            },
            rope=_rope_parameters,
        ),
    ),
    needs=("model.num_kv_heads", "model.head_dim"),
    may_have=(
        "model.moe.router_jitter",
        "model.moe.input_jitter",
        "model.longrope.original_max_seq_len",
        "model.longrope.short_factor",
        "model.longrope.long_factor",
        "model.longrope.short_mscale",
        "model.longrope.long_mscale",
    ),
    only={
        "model.moe.score_func": (("sparsemixer",), 'routes by "sparsemixer"'),
        "model.moe.top_k": ((2,), "picks two experts per token; use 2"),
        "model.moe.route_norm": ((False,), "does not normalise its weights; use false"),
        "model.moe.load_balance_coeff": (
            (None, 0),
            "has no balancing bias; use 0, and model.moe.aux_loss_coeff to balance",
        ),
    },
)
