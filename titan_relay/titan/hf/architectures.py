"""How each family's `[model]` keys are called in Hugging Face's `config.json`.

One table a class of `transformers`; the logic is in `config_json`. `config` below is a
`config.json` after `config_json.normalised`: `rope_theta` and `rope_type` are at its top level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.hf.errors import HfError

REQUIRED: Any = object()
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """One number of `[model]` and its name in `config.json`.

    toml: below [model].
    names: the one that is written first, then others that are understood.
    default: what a file without the key means; a function of the file where it depends on it.
    read, write: conversions where the two numbers are not the same.
    choice: how it is trained, not what it computes; the two may differ.
    in_rope: written by the architecture's `rope`.
    """

    toml: str
    names: tuple[str, ...]
    default: Any = REQUIRED
    read: Callable[[Any, Config], Any] | None = None
    write: Callable[[ModelConfig], Any] | None = None
    choice: bool = False
    in_rope: bool = False


def plain_rope(model: ModelConfig) -> dict[str, Any]:
    """`rope_parameters` of rotary embeddings without scaling."""
    return {"rope_type": "default", "rope_theta": model.rope_theta}


@dataclass(frozen=True)
class Architecture:
    """One class of `transformers`.

    keys: what both sides have. fixed: what every model of this class has in TOML.
    only: values of `config.json` beside which the family does not compute the same.
    extra: what else is written. rope: `rope_parameters` as they are written.
    """

    family: str
    model_type: str
    class_name: str
    keys: tuple[Key, ...]
    fixed: dict[str, Any]
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    extra: Callable[[ModelConfig], dict[str, Any]] | None = None
    rope: Callable[[ModelConfig], dict[str, Any]] = plain_rope


def _head_dim(config: Config) -> int:
    return int(config["hidden_size"]) // int(config["num_attention_heads"])


_SHARED = (
    Key("dim", ("hidden_size",)),
    Key("num_layers", ("num_hidden_layers",)),
    Key("num_heads", ("num_attention_heads",)),
    Key("vocab_size", ("vocab_size",)),
    Key("max_seq_len", ("max_position_embeddings",), choice=True),
    Key("rope_theta", ("rope_theta",)),
    Key("norm_eps", ("rms_norm_eps",)),
    Key("tie_word_embeddings", ("tie_word_embeddings",), default=False),
    Key("init_std", ("initializer_range",), default=0.02, choice=True),
    Key("moe.top_k", ("num_experts_per_tok",)),
)
_GQA = (
    Key("num_kv_heads", ("num_key_value_heads",)),
    Key("head_dim", ("head_dim",), default=_head_dim),
)
_AUX_LOSS = Key("moe.aux_loss_coeff", ("router_aux_loss_coef",), default=0.0, choice=True)
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "rope_type": ("default",),
}
_NO_WINDOW: dict[str, tuple[Any, ...]] = {"use_sliding_window": (False, None)}
_ALL_SPARSE: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}

QWEN3_MOE = Architecture(
    family="qwen3_moe",
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    keys=(
        *_SHARED,
        *_GQA,
        Key("moe.num_experts", ("num_experts", "num_local_experts")),
        Key("moe.expert_dim", ("moe_intermediate_size",)),
        Key("moe.route_norm", ("norm_topk_prob",)),
        _AUX_LOSS,
    ),
    fixed={"moe.score_func": "softmax", "moe.route_scale": 1.0},
    only={**_ONLY, **_NO_WINDOW, **_ALL_SPARSE, "attention_bias": (False,)},
)

QWEN2_MOE = Architecture(
    family="qwen2_moe",
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    keys=(
        *_SHARED,
        *_GQA,
        Key("moe.num_experts", ("num_experts", "num_local_experts")),
        Key("moe.expert_dim", ("moe_intermediate_size",)),
        Key("moe.shared_expert_dim", ("shared_expert_intermediate_size",)),
        Key("moe.route_norm", ("norm_topk_prob",)),
        _AUX_LOSS,
    ),
    fixed={"moe.score_func": "softmax", "moe.route_scale": 1.0},
    only={**_ONLY, **_NO_WINDOW, **_ALL_SPARSE, "qkv_bias": (True,)},
)

MIXTRAL = Architecture(
    family="mixtral",
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    keys=(
        *_SHARED,
        *_GQA,
        Key("moe.num_experts", ("num_local_experts",)),
        Key("moe.expert_dim", ("intermediate_size",)),
        _AUX_LOSS,
    ),
    fixed={"moe.score_func": "softmax", "moe.route_norm": True, "moe.route_scale": 1.0},
    only=_ONLY,
)


def _dense_layers(value: Any, config: Config) -> int:
    """A number of leading layers, or the kind of each layer."""
    if isinstance(value, int):
        return value
    kinds = list(value)
    count = kinds.count("dense")
    if kinds != ["dense"] * count + ["sparse"] * (len(kinds) - count):
        raise HfError("config.json: mlp_layer_types: family mla_moe has its dense layers first")
    return count


def _dense_dim(value: Any, config: Config) -> int:
    kinds = config.get("mlp_layer_types")
    has_dense = "dense" in kinds if kinds else config.get("first_k_dense_replace", 1)
    return int(value) if has_dense else 0


_MLA_KEYS = (
    *_SHARED,
    # A model without dense layers still has to say a width.
    Key(
        "dense_dim",
        ("intermediate_size",),
        read=_dense_dim,
        write=lambda model: model.dense_dim or model.moe.expert_dim,
    ),
    Key("mla.q_lora_rank", ("q_lora_rank",), default=0, write=lambda m: m.mla.q_lora_rank or None),
    Key("mla.kv_lora_rank", ("kv_lora_rank",)),
    Key("mla.qk_nope_head_dim", ("qk_nope_head_dim",)),
    Key("mla.qk_rope_head_dim", ("qk_rope_head_dim",)),
    Key("mla.v_head_dim", ("v_head_dim",)),
    Key("moe.num_experts", ("n_routed_experts",)),
    Key("moe.expert_dim", ("moe_intermediate_size",)),
    Key(
        "moe.shared_expert_dim",
        ("n_shared_experts",),
        default=0,
        read=lambda count, config: count * config["moe_intermediate_size"],
        write=lambda model: model.moe.shared_expert_dim // model.moe.expert_dim,
    ),
    Key("moe.route_norm", ("norm_topk_prob",)),
    Key("moe.route_scale", ("routed_scaling_factor",)),
    Key("moe.num_expert_groups", ("n_group",)),
    Key("moe.num_limited_groups", ("topk_group",)),
)
_MLA_FIXED = {
    "moe.score_func": "sigmoid",
    "mla.latent_norm_eps": 1e-6,  # a constant in both classes
    "num_kv_heads": 0,
    "head_dim": 0,
}
_MLA_ONLY = {
    **_ONLY,
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "rope_interleave": (True, None),
    "attention_bias": (False,),
}

DEEPSEEK_V3 = Architecture(
    family="mla_moe",
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    keys=(
        *_MLA_KEYS,
        Key("num_dense_layers", ("first_k_dense_replace",)),
    ),
    fixed=_MLA_FIXED,
    only=_MLA_ONLY,
    extra=lambda model: {
        "num_key_value_heads": model.num_heads,
        "num_nextn_predict_layers": 0,  # the class's default is 1
    },
)

GLM4_MOE_LITE = Architecture(
    family="mla_moe",
    model_type="glm4_moe_lite",
    class_name="Glm4MoeLiteForCausalLM",
    keys=(
        *_MLA_KEYS,
        Key(
            "num_dense_layers",
            ("mlp_layer_types", "first_k_dense_replace"),
            default=1,
            read=_dense_layers,
        ),
    ),
    fixed=_MLA_FIXED,
    only=_MLA_ONLY,
)


def _if_longrope(value: Any, config: Config) -> int:
    return int(value) if config["rope_type"] == "longrope" else 0


def _floats(value: Any, config: Config) -> tuple[float, ...]:
    return tuple(float(each) for each in value)


def _phi_rope(model: ModelConfig) -> dict[str, Any]:
    """LongRoPE, where the model has it."""
    numbers = model.longrope
    if not numbers.original_max_seq_len:
        return plain_rope(model)
    return {
        "rope_type": "longrope",
        "rope_theta": model.rope_theta,
        "original_max_position_embeddings": numbers.original_max_seq_len,
        "short_factor": list(numbers.short_factor),
        "long_factor": list(numbers.long_factor),
        "short_mscale": numbers.short_mscale,
        "long_mscale": numbers.long_mscale,
    }


PHIMOE = Architecture(
    family="phimoe",
    model_type="phimoe",
    class_name="PhimoeForCausalLM",
    keys=(
        *_SHARED,
        *_GQA,
        Key("moe.num_experts", ("num_local_experts",)),
        Key("moe.expert_dim", ("intermediate_size",)),
        Key("moe.router_jitter", ("router_jitter_noise",)),
        Key("moe.input_jitter", ("input_jitter_noise",), default=0.0, choice=True),
        _AUX_LOSS,
        Key(
            "longrope.original_max_seq_len",
            ("original_max_position_embeddings",),
            default=0,
            read=_if_longrope,
            in_rope=True,
        ),
        Key("longrope.short_factor", ("short_factor",), default=(), read=_floats, in_rope=True),
        Key("longrope.long_factor", ("long_factor",), default=(), read=_floats, in_rope=True),
        Key("longrope.short_mscale", ("short_mscale",), default=1.0, in_rope=True),
        Key("longrope.long_mscale", ("long_mscale",), default=1.0, in_rope=True),
    ),
    fixed={"moe.score_func": "sparsemixer", "moe.route_norm": False, "moe.route_scale": 1.0},
    only={
        **_ONLY,
        "rope_type": ("default", "longrope"),
        "attention_bias": (True,),
        "lm_head_bias": (True,),
    },
    rope=_phi_rope,
)

# Where several classes are of one family, the first is the one that is written.
ARCHITECTURES = (QWEN3_MOE, QWEN2_MOE, MIXTRAL, DEEPSEEK_V3, GLM4_MOE_LITE, PHIMOE)
