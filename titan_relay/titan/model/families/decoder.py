"""The decoder that all families share: pre-norm blocks whose initial weights depend on the seed and
the parameters' names only.

A family subclasses `RelayDecoder` where its attention is not grouped-query attention; everything
else about it is configuration, put together in its own file from `parts`.

Shape suffixes: B batch, L tokens of this rank, D model dim.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import spmd_types as spmd
import torch
from torch import nn
from torchtitan.models.common.attention import AttentionMasksType, GQAttention
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
)
from torchtitan.models.common.rope import RoPE
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.utils import get_moe_model_nparams_and_flops
from torchtitan.protocols.sharding import ShardingConfig

from titan_relay.recompute.retained import rebuilt
from titan_relay.titan.model.init import init_by_name
from titan_relay.titan.private_torchtitan import head_is_left_out


class RelayBlock(TransformerBlock):
    """Attention, then experts (or, in a dense layer, one feed-forward), each added to the residual.

    It tells its MoE layer which tokens are padding (position -1).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()
        self.attention = config.attention.build()
        self.attention_norm = config.attention_norm.build()
        self.ffn_norm = config.ffn_norm.build()
        self.moe_enabled = config.moe is not None
        if config.moe is not None:
            self.moe = config.moe.build()
        else:
            assert config.feed_forward is not None
            self.feed_forward = config.feed_forward.build()

    def forward(
        self,
        x: torch.Tensor,
        attention_masks: AttentionMasksType | None,
        positions: torch.Tensor | None = None,
        token_keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply the block to `x` `(B, L, D)`; positions and keys `(B, L)`."""
        valid_BL = None
        if positions is not None:
            valid_BL = positions >= 0
            positions = positions.clamp(min=0)
        x = self.attend(x, attention_masks, positions)
        if not self.moe_enabled:
            dense: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
            return dense
        sparse: torch.Tensor = x + self.moe(self.ffn_norm(x), valid_BL, token_keys)
        return sparse

    def attend(
        self,
        x: torch.Tensor,
        attention_masks: AttentionMasksType | None,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """The block's attention half, residual included; what `compile` compiles."""
        normed = rebuilt(self.attention_norm, x)
        out: torch.Tensor = x + self.attention(normed, attention_masks, positions)
        return out


class RelayDecoder(Decoder):
    """Embedding, blocks, norm, head; with grouped-query attention unless a subclass says else."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        init_seed: int | None = 0
        """What initial weights are made from. None: they stay as memory was, for a dry run."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Take what the run says about parallelism; torchtitan calls it before building."""
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            parallelism = config.parallelism
            self.shard(
                enable_sp=parallelism.enable_sequence_parallel,
                enable_ep=parallelism.expert_parallel_degree > 1,
            )

        def shard(self, *, enable_sp: bool, enable_ep: bool) -> None:
            """Say how tensor and expert parallelism lay out every module of this config."""
            set_qwen3_sharding_config(self, enable_sp=enable_sp, enable_ep=enable_ep)
            shard_extras(self, enable_sp=enable_sp)

        def head_dims(self) -> int:
            """Multiply-adds per query, key and head: width of a query plus width of a value."""
            attention = self.layers[0].attention
            assert isinstance(attention, GQAttention.Config)
            assert attention.head_dim is not None
            return 2 * attention.head_dim

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters of the whole model, and training FLOPs per token."""
            num_heads = self.layers[0].attention.n_heads
            return get_moe_model_nparams_and_flops(
                self, model, num_heads, self.head_dims(), seq_len
            )

    def __init__(self, config: Config):
        super().__init__(config)
        for name, block in self.layers.items():
            if block.moe_enabled:
                block.moe.set_place(int(name))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: AttentionMasksType | None = None,
        token_keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits `(B, L, vocab)` of this rank's tokens `(B, L)`.

        A pipeline stage lacks the ends that other stages have; without an embedding `tokens` are
        hidden states. `token_keys` are for families that sample in training.
        """
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, attention_masks, positions, token_keys)
        if self.norm is not None:
            x = self.norm(x)
        # A chunked loss applies the head itself.
        return x if self.lm_head is None or head_is_left_out(self) else self.lm_head(x)

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialise buffers and parameters."""
        super().init_states(buffer_device=buffer_device)
        share_rotary_tables(self)
        assert isinstance(self.config, RelayDecoder.Config)
        if self.config.init_seed is not None:
            init_by_name(self, seed=self.config.init_seed)

    def get_attention_masks(self, positions: torch.Tensor) -> AttentionMasksType | None:
        """Masks of packed documents; each pad (position -1) is a document of its own."""
        return super().get_attention_masks(positions.clamp(min=0))


def shard_extras(config: Any, *, enable_sp: bool) -> None:
    """Lay out under tensor parallelism what torchtitan's plan for Qwen3 does not know.

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


def share_rotary_tables(model: nn.Module) -> None:
    """Let layers whose tables have the same contents hold the same table.

    A table has a row for every position of the whole sequence, on every rank: with head width 128
    and long sequences those of 48 layers are as large as 48 copies of a quarter of a rank's tokens
    or more.
    """
    tables: dict[tuple[object, ...], torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, RoPE):
            config = module.config
            values = (repr(getattr(config, field.name)) for field in fields(config))
            key = (type(module), *values)
            module.cache = tables.setdefault(key, module.cache)
