"""How many parameters a model has, and what training it costs, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.model.families import build_model_config


@dataclass(frozen=True)
class Counts:
    """Parameters of one model, and training FLOPs per token.

    total: all parameters; buffers, such as the bias on the choice of experts, are none.
    routed: those of experts that a token is sent to by choice; active: what one token meets, so of
    the routed ones `top_k / num_experts`. embedding, head: the two ends; a head that shares the
    embedding's weight has none. flops_per_token: forward and backward without recomputation, 6 per
    active weight (the embedding is a look-up) and 6 per head, width of query and value, and token
    of the sequence.
    """

    total: int
    active: int
    routed: int
    embedding: int
    head: int
    flops_per_token: int


def count(model: ModelConfig, seq_len: int) -> Counts:
    """Count on the meta device: neither memory nor time depends on the model's width."""
    config = build_model_config(model, seed=0, cpu=True)
    with torch.device("meta"):
        built = config.build()
    sizes = {name: param.numel() for name, param in built.named_parameters()}
    total, flops_per_token = config.get_nparams_and_flops(built, seq_len)
    routed = sum(size for name, size in sizes.items() if ".routed_experts." in name)
    head = sum(size for name, size in sizes.items() if name.startswith("lm_head."))
    return Counts(
        total=total,
        active=total - routed + routed * model.moe.top_k // model.moe.num_experts,
        routed=routed,
        embedding=model.vocab_size * model.dim,
        head=0 if model.tie_word_embeddings else head,
        flops_per_token=flops_per_token,
    )
