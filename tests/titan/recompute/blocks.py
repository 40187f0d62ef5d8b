"""Blocks with retention on one process, and the units they are measured in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.titan.tiny import TINY, TINY_MOE
from titan_relay.config.schema import ModelConfig
from titan_relay.moe import RelayOptions
from titan_relay.titan.model.experts import relay_routed_experts
from titan_relay.titan.model.families import build_model_config
from titan_relay.titan.recompute.block_levels import BlockRetention, Levels, make_retainable

# Qwen3-30B-A3B (D = 2048, 32 and 4 heads of 128, 128 experts of 768, top-8) at a quarter of its
# width, with everything that is kept or computed per token in the same ratio to D.
QWEN3_RATIOS = replace(
    TINY,
    num_layers=1,
    dim=512,
    num_heads=8,
    num_kv_heads=1,
    head_dim=128,
    max_seq_len=8192,
    moe=replace(TINY_MOE, num_experts=32, top_k=2, expert_dim=192, aux_loss_coeff=0.01),
)


def relay_model(
    config: ModelConfig,
    levels: Sequence[str] | None,
    *,
    compiled: bool = False,
    host_budget_bytes: int = 0,
) -> nn.Module:
    """The model on the relay of one rank, in training mode; None: nothing is checkpointed."""
    model_config = build_model_config(config, seed=0, cpu=True)
    for layer in model_config.layers:
        if layer.moe is not None:
            experts = layer.moe.routed_experts
            layer.moe.routed_experts = relay_routed_experts(experts, options=RelayOptions())
    model: Any = model_config.build()
    with torch.no_grad():
        model.init_weights()
    if compiled:
        for block in model.layers.values():
            block.attend = torch.compile(block.attend, backend="aot_eager")
    if levels is not None:
        chosen = Levels(dict(enumerate(levels)))  # type: ignore[arg-type]
        make_retainable(model, chosen)
        policy = BlockRetention.Config(levels=chosen, host_budget_bytes=host_budget_bytes)
        policy.build().apply(model)
        model.levels = chosen
    trained: nn.Module = model.train()
    return trained
