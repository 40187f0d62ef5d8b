"""What Hugging Face calls a family's numbers: the classes of `transformers` that compute it, and
the names of the `[model]` keys in their `config.json`.

A family lists its own in its file; here are the two records and what most families share. The logic
that reads and writes by them is in `titan_relay.titan.hf.config_json`. `config` below is a
`config.json` after `config_json.normalised`: `rope_theta` and `rope_type` are at its top level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_relay.config.schema import ModelConfig

REQUIRED: Any = object()
Config = Mapping[str, Any]


@dataclass(frozen=True)
class HfKey:
    """One number of `[model]` and its name in `config.json`.

    toml: below [model].
    names: the one that is written first, then others that are understood.
    default: what a file without the key means; a function of the file where it depends on it.
    read, write: conversions where the two numbers are not the same; `read` raises `ValueError` for
        what the family does not compute.
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

    model_type: str
    class_name: str
    keys: tuple[HfKey, ...]
    fixed: dict[str, Any]
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    extra: Callable[[ModelConfig], dict[str, Any]] | None = None
    rope: Callable[[ModelConfig], dict[str, Any]] = plain_rope


SHARED = (
    HfKey("dim", ("hidden_size",)),
    HfKey("num_layers", ("num_hidden_layers",)),
    HfKey("num_heads", ("num_attention_heads",)),
    HfKey("vocab_size", ("vocab_size",)),
    HfKey("max_seq_len", ("max_position_embeddings",), choice=True),
    HfKey("rope_theta", ("rope_theta",)),
    HfKey("norm_eps", ("rms_norm_eps",)),
    HfKey("tie_word_embeddings", ("tie_word_embeddings",), default=False),
    HfKey("init_std", ("initializer_range",), default=0.02, choice=True),
    HfKey("moe.top_k", ("num_experts_per_tok",)),
)


def _head_dim(config: Config) -> int:
    return int(config["hidden_size"]) // int(config["num_attention_heads"])


# Of families with grouped-query attention, which balance by a loss.
GQA = (
    *SHARED,
    HfKey("num_kv_heads", ("num_key_value_heads",)),
    HfKey("head_dim", ("head_dim",), default=_head_dim),
    HfKey("moe.aux_loss_coeff", ("router_aux_loss_coef",), default=0.0, choice=True),
)
# Mixtral's names for its experts, Qwen's and DeepSeek's.
LOCAL_EXPERTS = (
    HfKey("moe.num_experts", ("num_local_experts",)),
    HfKey("moe.expert_dim", ("intermediate_size",)),
)
QWEN_EXPERTS = (
    HfKey("moe.num_experts", ("num_experts", "num_local_experts")),
    HfKey("moe.expert_dim", ("moe_intermediate_size",)),
    HfKey("moe.route_norm", ("norm_topk_prob",)),
)
DEEPSEEK_EXPERTS = (
    HfKey("moe.num_experts", ("n_routed_experts",)),
    HfKey("moe.expert_dim", ("moe_intermediate_size",)),
    HfKey(
        "moe.shared_expert_dim",
        ("n_shared_experts",),
        default=0,
        read=lambda count, config: count * config["moe_intermediate_size"],
        write=lambda model: model.moe.shared_expert_dim // model.moe.expert_dim,
    ),
    HfKey("moe.route_norm", ("norm_topk_prob",)),
    HfKey("moe.route_scale", ("routed_scaling_factor",)),
    HfKey("moe.num_expert_groups", ("n_group",)),
    HfKey("moe.num_limited_groups", ("topk_group",)),
)
SOFTMAX = {"moe.score_func": "softmax", "moe.route_scale": 1.0}

PLAIN: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "rope_type": ("default",)}
# What Qwen's classes could have, and no released model of these families has.
QWEN_PLAIN: dict[str, tuple[Any, ...]] = {
    **PLAIN,
    "use_sliding_window": (False, None),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
