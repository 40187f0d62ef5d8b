"""Qwen3 MoE (arXiv:2505.09388): GQA with per-head QK-norm, softmax top-k routing, no shared expert.

Built from torchtitan's blocks with its parameter names, so its Hugging Face adapter applies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_gqa_config,
    make_routed_experts_config,
)
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.module import Module

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.attention import CpuAttention
from titan_relay.titan.init import Constant, Normal, init_by_name
from titan_relay.titan.moe import MoE
from titan_relay.titan.router import Float32Linear, Router

__all__ = ["Qwen3MoEModel", "Qwen3StateDictAdapter", "build"]


class Qwen3MoEBlock(Qwen3TransformerBlock):
    """A Qwen3 block that tells its MoE layer which tokens are padding (position -1)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass

    def forward(
        self,
        x: torch.Tensor,
        attention_masks: AttentionMasksType | None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply attention and experts to `x` `(B, L, D)`; positions `(B, L)`."""
        valid_BL = None
        if positions is not None:
            valid_BL = positions >= 0
            positions = positions.clamp(min=0)
        x = self.attend(x, attention_masks, positions)
        return x + self.moe(self.ffn_norm(x), valid_BL)

    def attend(
        self,
        x: torch.Tensor,
        attention_masks: AttentionMasksType | None,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """The block's attention half, residual included; what `compile` compiles."""
        return x + self.attention(self.attention_norm(x), attention_masks, positions)


class Qwen3MoEModel(Qwen3Model):
    """Qwen3 whose initial weights depend on the seed and the parameters' names only."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        init_seed: int = 0

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialise buffers and parameters."""
        super().init_states(buffer_device=buffer_device)
        assert isinstance(self.config, Qwen3MoEModel.Config)
        init_by_name(self, seed=self.config.init_seed)

    def get_attention_masks(self, positions: torch.Tensor) -> AttentionMasksType | None:
        """Masks of packed documents; each pad (position -1) is a document of its own."""
        return super().get_attention_masks(positions.clamp(min=0))


def build(model: ModelConfig, *, seed: int, cpu: bool) -> Qwen3MoEModel.Config:
    """The whole model's config from the numbers of `[model]`."""
    embedding_init = skip_param_init if model.tie_word_embeddings else Normal(model.init_std)
    return Qwen3MoEModel.Config(
        init_seed=seed,
        dim=model.dim,
        vocab_size=model.vocab_size,
        enable_weight_tying=model.tie_word_embeddings,
        norm=_norm(model, model.dim),
        tok_embeddings=Embedding.Config(
            num_embeddings=model.vocab_size,
            embedding_dim=model.dim,
            param_init={"weight": embedding_init},
        ),
        lm_head=Linear.Config(
            in_features=model.dim,
            out_features=model.vocab_size,
            param_init={"weight": Normal(model.init_std)},
        ),
        layers=[_block(model, cpu=cpu) for _ in range(model.num_layers)],
    )


def _norm(model: ModelConfig, dim: int) -> RMSNorm.Config:
    return RMSNorm.Config(
        normalized_shape=dim, eps=model.norm_eps, param_init={"weight": Constant(1.0)}
    )


def _residual_output_init(model: ModelConfig) -> Normal:
    """Outputs into the residual stream start smaller, as 2 * num_layers of them are added up."""
    return Normal(model.init_std / (2 * model.num_layers) ** 0.5)


def _inner_attention(model: ModelConfig, *, cpu: bool) -> Module.Config:
    if cpu:
        return CpuAttention.Config()
    backend = "flex" if model.attention_backend == "auto" else model.attention_backend
    return get_attention_config(backend)


def _block(model: ModelConfig, *, cpu: bool) -> Qwen3MoEBlock.Config:
    return Qwen3MoEBlock.Config(
        attention_norm=_norm(model, model.dim),
        ffn_norm=_norm(model, model.dim),
        attention=make_gqa_config(
            dim=model.dim,
            n_heads=model.num_heads,
            n_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            wqkv_param_init={"weight": Normal(model.init_std)},
            wo_param_init={"weight": _residual_output_init(model)},
            inner_attention=_inner_attention(model, cpu=cpu),
            rope=CosSinRoPE.Config(
                dim=model.head_dim, max_seq_len=model.max_seq_len, theta=model.rope_theta
            ),
            qk_norm=_norm(model, model.head_dim),
        ),
        moe=_moe(model),
    )


def _moe(model: ModelConfig) -> MoE.Config:
    moe = model.moe
    return MoE.Config(
        num_experts=moe.num_experts,
        aux_loss_coeff=moe.aux_loss_coeff,
        z_loss_coeff=moe.z_loss_coeff,
        aux_loss_scope=moe.aux_loss_scope,
        load_balance_coeff=moe.effective_load_balance_coeff or None,
        router=Router.Config(
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            score_func=moe.score_func,
            route_norm=moe.route_norm,
            route_scale=moe.route_scale,
            gate=Float32Linear.Config(
                in_features=model.dim,
                out_features=moe.num_experts,
                param_init={"weight": Normal(model.init_std)},
            ),
        ),
        routed_experts=make_routed_experts_config(
            dim=model.dim,
            hidden_dim=moe.expert_dim,
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            comm_backend="standard",
            param_init={
                "w1_EFD": Normal(model.init_std),
                "w3_EFD": Normal(model.init_std),
                "w2_EDF": _residual_output_init(model),
            },
        ),
    )
