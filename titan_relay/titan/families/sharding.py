"""How tensor parallelism lays out what torchtitan's plan for Qwen3 does not know: biases of norms
and of the head, and the gate of a shared expert.
"""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
)
from torchtitan.protocols.sharding import ShardingConfig


def shard_extras(config: Any, *, enable_sp: bool) -> None:
    """Complete the sharding of a decoder's config.

    A norm's bias lies like its weight, the head's bias like the rows of its weight.
    """
    norms = [config.norm]
    for layer in config.layers:
        norms += [layer.attention_norm, layer.ffn_norm]
        if layer.moe is not None:
            _shard_gate(layer.moe.shared_experts, enable_sp=enable_sp)
    for each in (*norms, config.lm_head):
        states = each.sharding_config.state_shardings
        states["bias"] = states["weight"]


def _shard_gate(shared_experts: Any, *, enable_sp: bool) -> None:
    """The gate is whole on every rank; its output is cut like the shared expert's."""
    gate = getattr(shared_experts, "gate", None)
    if gate is None:
        return
    whole = dense_activation_placement(tp=spmd.R)
    gate.sharding_config = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        out_src_shardings=whole,
        out_dst_shardings=dense_sequence_parallel_placement() if enable_sp else whole,
    )
