"""The tiny models that are compared with transformers: one entry per model, each written twice.

`hf` are the arguments of transformers' config class, `model` the keys below `[model]`, by hand and
not derived from each other, so that a key that is read wrongly on either side shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 263
SEQ_LEN = 32


@dataclass(frozen=True)
class Case:
    """One tiny model.

    config: name of transformers' config class. hf: its arguments. model: keys of `[model]`, with
    dots for the tables below it. training: compare the training-mode function too where it is
    another one.
    """

    family: str
    name: str
    config: str
    hf: dict[str, Any]
    model: dict[str, Any]


def _case(family: str, name: str, config: str, hf: dict[str, Any], model: dict[str, Any]) -> Case:
    common_hf = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 2,
        "max_position_embeddings": SEQ_LEN,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }
    common_model = {
        "family": family,
        "vocab_size": VOCAB_SIZE,
        "num_layers": 2,
        "max_seq_len": SEQ_LEN,
        "tie_word_embeddings": False,
        "moe.aux_loss_coeff": 0.0,
        "moe.z_loss_coeff": 0.0,
        "moe.load_balance_coeff": 0.0,
    }
    return Case(family, name, config, common_hf | hf, common_model | model)


CASES = [
    _case(
        "qwen3_moe",
        "GQA 6:2, 8 experts, top 3",
        "Qwen3MoeConfig",
        {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 20,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {
            "dim": 48,
            "num_heads": 6,
            "num_kv_heads": 2,
            "head_dim": 16,
            "norm_eps": 1e-6,
            "rope_theta": 1e6,
            "moe.expert_dim": 20,
            "moe.num_experts": 8,
            "moe.top_k": 3,
            "moe.score_func": "softmax",
            "moe.route_norm": True,
        },
    ),
    _case(
        "qwen3_moe",
        "MHA of 5 heads, no renormalisation, tied",
        "Qwen3MoeConfig",
        {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 12,
            "moe_intermediate_size": 36,
            "num_experts": 6,
            "num_experts_per_tok": 6,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "tie_word_embeddings": True,
        },
        {
            "dim": 40,
            "num_heads": 5,
            "num_kv_heads": 5,
            "head_dim": 12,
            "norm_eps": 1e-5,
            "rope_theta": 1e4,
            "tie_word_embeddings": True,
            "moe.expert_dim": 36,
            "moe.num_experts": 6,
            "moe.top_k": 6,
            "moe.score_func": "softmax",
            "moe.route_norm": False,
        },
    ),
    _case(
        "qwen2_moe",
        "GQA 7:1, wide shared expert",
        "Qwen2MoeConfig",
        {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 72,
            "num_experts": 10,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "qkv_bias": True,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {
            "dim": 56,
            "num_heads": 7,
            "num_kv_heads": 1,
            "head_dim": 8,
            "norm_eps": 1e-6,
            "rope_theta": 1e6,
            "moe.expert_dim": 20,
            "moe.shared_expert_dim": 72,
            "moe.num_experts": 10,
            "moe.top_k": 4,
            "moe.score_func": "softmax",
            "moe.route_norm": False,
        },
    ),
    _case(
        "qwen2_moe",
        "MHA of 4 heads, small shared expert, top 1",
        "Qwen2MoeConfig",
        {
            "hidden_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 28,
            "shared_expert_intermediate_size": 12,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "qkv_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        {
            "dim": 48,
            "num_heads": 4,
            "num_kv_heads": 4,
            "head_dim": 12,
            "norm_eps": 1e-5,
            "rope_theta": 1e4,
            "moe.expert_dim": 28,
            "moe.shared_expert_dim": 12,
            "moe.num_experts": 4,
            "moe.top_k": 1,
            "moe.score_func": "softmax",
            "moe.route_norm": False,
        },
    ),
    _case(
        "mixtral",
        "GQA 9:3, 8 experts, top 2",
        "MixtralConfig",
        {
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "intermediate_size": 44,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "router_jitter_noise": 0.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {
            "dim": 72,
            "num_heads": 9,
            "num_kv_heads": 3,
            "head_dim": 8,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "moe.expert_dim": 44,
            "moe.num_experts": 8,
            "moe.top_k": 2,
            "moe.score_func": "softmax",
            "moe.route_norm": True,
        },
    ),
]
