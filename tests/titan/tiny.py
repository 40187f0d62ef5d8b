"""A tiny model and run configuration shared by the trainer's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import titan_relay.titan  # noqa: F401  (adapts torchtitan before it is imported)
from titan_relay.config.schema import ModelConfig, MoEConfig
from titan_relay.titan.model.attention import prepare_cpu_batch
from titan_relay.titan.model.balance_hook import moe_layers
from titan_relay.titan.model.experts import native_dtype_experts
from titan_relay.titan.model.families import build_model_config

TINY_MOE = MoEConfig(num_experts=6, top_k=2, expert_dim=24, score_func="softmax", route_norm=True)
TINY = ModelConfig(
    family="qwen3_moe",
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=64,
    max_seq_len=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_word_embeddings=False,
    init_std=0.1,
    moe=TINY_MOE,
)


def tiny_config(**moe: Any) -> ModelConfig:
    """The tiny model with some of its `[model.moe]` changed."""
    return replace(TINY, moe=replace(TINY_MOE, **moe))


def tiny_model(config: ModelConfig = TINY, seed: int = 0) -> nn.Module:
    """The model on one process, float32, in training mode."""
    model_config = build_model_config(config, seed=seed, cpu=True)
    for layer in model_config.layers:
        if layer.moe is None:
            continue
        experts = layer.moe.routed_experts
        experts.inner_experts = native_dtype_experts(experts.inner_experts)
    model = model_config.build()
    with torch.no_grad():
        model.init_weights()
    return model.train()


def apply_model(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits `(B, L, vocab)` of whole rows."""
    tokens, _, positions, mask = prepare_cpu_batch(tokens, tokens, positions, None, None)
    logits: torch.Tensor = model(tokens, attention_masks=mask, positions=positions)
    return logits


def row_positions(num_rows: int, seq_len: int, num_pads: int = 0) -> torch.Tensor:
    """Positions of rows that hold one document and then padding."""
    positions = torch.arange(seq_len).repeat(num_rows, 1)
    if num_pads:
        positions[:, -num_pads:] = -1
    return positions


def counts_of(model: nn.Module) -> torch.Tensor:
    """Tokens per expert `(layers, E)` recorded since the meters were reset."""
    return torch.stack(
        [moe.meter.read(torch.device("cpu"))[: moe.num_experts] for _, moe in moe_layers([model])]
    )
