"""How each family's `[model]` keys are called in Hugging Face's `config.json`.

One table a class of `transformers`; the logic is in `config_json`. `config` below is a
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
class Key:
    """One number of `[model]` and its name in `config.json`.

    toml: below [model].
    names: the one that is written first, then others that are understood.
    default: what a file without the key means; a function of the file where it depends on it.
    read, write: conversions where the two numbers are not the same.
    choice: how it is trained, not what it computes; the two may differ.
    """

    toml: str
    names: tuple[str, ...]
    default: Any = REQUIRED
    read: Callable[[Any, Config], Any] | None = None
    write: Callable[[ModelConfig], Any] | None = None
    choice: bool = False


@dataclass(frozen=True)
class Architecture:
    """One class of `transformers`.

    keys: what both sides have. fixed: what every model of this class has in TOML.
    only: values of `config.json` beside which the family does not compute the same.
    """

    family: str
    model_type: str
    class_name: str
    keys: tuple[Key, ...]
    fixed: dict[str, Any]
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)


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
    "use_sliding_window": (False, None),
}
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
    only={**_ONLY, **_ALL_SPARSE, "attention_bias": (False,)},
)

ARCHITECTURES = (QWEN3_MOE,)
