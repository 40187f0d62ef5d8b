"""Model families: each file turns the numbers of `[model]` into a torchtitan model.

What families share is in `decoder` (the model and its block) and `parts` (everything inside).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.model.families import mixtral, mla_moe, phimoe, qwen2_moe, qwen3_moe
from titan_relay.titan.model.families.decoder import RelayDecoder


@dataclass(frozen=True)
class Family:
    """How one architecture is built and how its weights map to Hugging Face's names."""

    build: Callable[..., RelayDecoder.Config]
    adapter: type[BaseStateDictAdapter]


FAMILIES: dict[str, Family] = {
    "mixtral": Family(mixtral.build, mixtral.Adapter),
    "mla_moe": Family(mla_moe.build, mla_moe.Adapter),
    "phimoe": Family(phimoe.build, phimoe.Adapter),
    "qwen2_moe": Family(qwen2_moe.build, qwen2_moe.Adapter),
    "qwen3_moe": Family(qwen3_moe.build, qwen3_moe.Adapter),
}


def build_model_config(model: ModelConfig, *, seed: int, cpu: bool) -> RelayDecoder.Config:
    """The torchtitan model config of `[model]`; `cpu` chooses the attention that runs there."""
    return FAMILIES[model.family].build(model, seed=seed, cpu=cpu)
