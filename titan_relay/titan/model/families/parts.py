"""The parts that families are put together from: each turns numbers of `[model]` into a torchtitan
config with this project's initial weights.

Initial weights: normal with `init_std`; outputs into the residual stream (`residual_std`) start
smaller; norms are one and biases zero.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import init
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_routed_experts_config,
)
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols.module import Module

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.model.attention import CpuAttention
from titan_relay.titan.model.families.decoder import RelayBlock, RelayDecoder
from titan_relay.titan.model.init import Normal
from titan_relay.titan.model.low_memory import (
    CosSinRoPE,
    FeedForward,
    GQAttention,
    RMSNorm,
    SigmoidGatedFeedForward,
)
from titan_relay.titan.model.moe import MoE
from titan_relay.titan.model.router import Float32Linear, Router

# Makes a norm from width and epsilon.
Norm = Callable[[int, float], Module.Config]


def decoder(
    model: ModelConfig,
    *,
    seed: int,
    layer: Callable[[int], RelayBlock.Config],
    norm: Norm | None = None,
    head_bias: bool = False,
    kind: type[RelayDecoder.Config] = RelayDecoder.Config,
) -> RelayDecoder.Config:
    """The whole model: embedding, `layer(index)` for each of `num_layers`, final norm, head.

    Layers are made one by one, because torchtitan writes each one's sharding into its config.

    Args:
        norm: makes the final norm; `rms_norm` unless given.
    """
    return kind(
        init_seed=seed,
        dim=model.dim,
        vocab_size=model.vocab_size,
        enable_weight_tying=model.tie_word_embeddings,
        tok_embeddings=embedding(model),
        layers=[layer(index) for index in range(model.num_layers)],
        norm=(norm or rms_norm)(model.dim, model.norm_eps),
        lm_head=linear(model.dim, model.vocab_size, model.init_std, bias=head_bias),
    )


def block(
    model: ModelConfig,
    attention: Module.Config,
    *,
    moe: MoE.Config | None = None,
    feed_forward: FeedForward.Config | None = None,
    norm: Norm | None = None,
) -> RelayBlock.Config:
    """One layer: attention, then experts or a dense feed-forward, each behind its own norm."""
    norm = norm or rms_norm
    return RelayBlock.Config(
        attention_norm=norm(model.dim, model.norm_eps),
        attention=attention,
        ffn_norm=norm(model.dim, model.norm_eps),
        moe=moe,
        feed_forward=feed_forward,
    )


def residual_std(model: ModelConfig) -> float:
    """Outputs into the residual stream start smaller, as 2 * num_layers of them are added up."""
    return model.init_std / (2 * model.num_layers) ** 0.5


def linear(in_features: int, out_features: int, std: float, *, bias: bool = False) -> Linear.Config:
    """A linear layer with normal weights and a zero bias."""
    return Linear.Config(
        in_features=in_features,
        out_features=out_features,
        bias=bias,
        param_init={"weight": Normal(std), "bias": init.zeros_},
    )


def rms_norm(dim: int, eps: float) -> RMSNorm.Config:
    """An RMSNorm whose weight starts at one."""
    return RMSNorm.Config(normalized_shape=dim, eps=eps, param_init={"weight": init.ones_})


def layer_norm(dim: int, eps: float) -> LayerNorm.Config:
    """A LayerNorm whose weight starts at one and whose bias at zero."""
    return LayerNorm.Config(
        normalized_shape=dim,
        eps=eps,
        param_init={"weight": init.ones_, "bias": init.zeros_},
    )


def embedding(model: ModelConfig) -> Embedding.Config:
    """The token embedding; where it shares its weight with the head, the head initialises it."""
    fill = skip_param_init if model.tie_word_embeddings else Normal(model.init_std)
    return Embedding.Config(
        num_embeddings=model.vocab_size,
        embedding_dim=model.dim,
        param_init={"weight": fill},
    )


def inner_attention(model: ModelConfig, *, cpu: bool) -> Module.Config:
    """The attention kernel; `cpu` chooses the one that runs there."""
    if cpu:
        return CpuAttention.Config()
    backend = "flex" if model.attention_backend == "auto" else model.attention_backend
    return get_attention_config(backend)


def rope(model: ModelConfig) -> RoPE.Config:
    """Rotary embeddings over the whole head, halves rotated against each other."""
    return CosSinRoPE.Config(
        dim=model.head_dim, max_seq_len=model.max_seq_len, theta=model.rope_theta
    )


def gqa(
    model: ModelConfig,
    *,
    cpu: bool,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    rope_config: RoPE.Config | None = None,
) -> GQAttention.Config:
    """Grouped-query attention.

    Args:
        qk_norm: an RMSNorm on every query and key head.
        qkv_bias, out_bias: biases of the projections into and out of attention.
        rope_config: `rope(model)` unless given.
    """
    heads_dim, kv_dim = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
    return GQAttention.Config(
        dim=model.dim,
        n_heads=model.num_heads,
        n_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        qkv_linear=QKVLinear.Config(
            head_dim=model.head_dim,
            wq=linear(model.dim, heads_dim, model.init_std, bias=qkv_bias),
            wkv=linear(model.dim, kv_dim, model.init_std, bias=qkv_bias),
        ),
        wo=linear(heads_dim, model.dim, residual_std(model), bias=out_bias),
        qk_norm=rms_norm(model.head_dim, model.norm_eps) if qk_norm else None,
        inner_attention=inner_attention(model, cpu=cpu),
        rope=rope(model) if rope_config is None else rope_config,
    )


def feed_forward(model: ModelConfig, hidden_dim: int) -> FeedForward.Config:
    """A dense SwiGLU feed-forward: w2 (silu(w1 x) * w3 x)."""
    return FeedForward.Config(
        w1=linear(model.dim, hidden_dim, model.init_std),
        w2=linear(hidden_dim, model.dim, residual_std(model)),
        w3=linear(model.dim, hidden_dim, model.init_std),
    )


def gated_feed_forward(model: ModelConfig) -> SigmoidGatedFeedForward.Config:
    """The shared expert of Qwen2: a feed-forward times the sigmoid of one number per token."""
    plain = feed_forward(model, model.moe.shared_expert_dim)
    return SigmoidGatedFeedForward.Config(
        w1=plain.w1, w2=plain.w2, w3=plain.w3, gate=linear(model.dim, 1, model.init_std)
    )


def router(model: ModelConfig) -> Router.Config:
    """Top-k routing in float32."""
    moe = model.moe
    grouped = moe.num_expert_groups > 1
    return Router.Config(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        score_func=moe.score_func,
        route_norm=moe.route_norm,
        route_scale=moe.route_scale,
        num_expert_groups=moe.num_expert_groups if grouped else None,
        num_limited_groups=moe.num_limited_groups if grouped else None,
        gate=gate(model),
    )


def gate(model: ModelConfig) -> Float32Linear.Config:
    """The router's linear layer."""
    return Float32Linear.Config(
        in_features=model.dim,
        out_features=model.moe.num_experts,
        param_init={"weight": Normal(model.init_std)},
    )


def moe(
    model: ModelConfig,
    *,
    router_config: Router.Config | None = None,
    shared_experts: FeedForward.Config | None = None,
    has_expert_bias: bool = False,
) -> MoE.Config:
    """The mixture of experts, with `router(model)` unless another router is given.

    has_expert_bias: a bias on the choice of experts belongs to the architecture.
    """
    numbers = model.moe
    return MoE.Config(
        num_experts=numbers.num_experts,
        aux_loss_coeff=numbers.aux_loss_coeff,
        z_loss_coeff=numbers.z_loss_coeff,
        aux_loss_scope=numbers.aux_loss_scope,
        input_jitter=numbers.input_jitter,
        load_balance_coeff=numbers.effective_load_balance_coeff or None,
        router=router(model) if router_config is None else router_config,
        shared_experts=shared_experts,
        has_expert_bias=has_expert_bias,
        routed_experts=make_routed_experts_config(
            dim=model.dim,
            hidden_dim=numbers.expert_dim,
            num_experts=numbers.num_experts,
            top_k=numbers.top_k,
            comm_backend="standard",
            param_init={
                "w1_EFD": Normal(model.init_std),
                "w3_EFD": Normal(model.init_std),
                "w2_EDF": Normal(residual_std(model)),
            },
        ),
    )
