"""Model families: each file turns the numbers of `[model]` into a torchtitan model, and says which
numbers it has and what Hugging Face calls them and its weights.

What families share is in `decoder` (the model and its block), `parts` (everything inside),
`adapter` (names of weights) and `architecture` (names of numbers).
"""

from __future__ import annotations

from titan_relay.config import RunConfig, Sources
from titan_relay.config.schema import ModelConfig
from titan_relay.titan.model.families import mixtral, mla_moe, phimoe, qwen2_moe, qwen3_moe
from titan_relay.titan.model.families.decoder import RelayDecoder
from titan_relay.titan.model.families.family import Family, check_limits

FAMILIES: dict[str, Family] = {
    "mixtral": mixtral.FAMILY,
    "mla_moe": mla_moe.FAMILY,
    "phimoe": phimoe.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
}


def build_model_config(model: ModelConfig, *, seed: int, cpu: bool) -> RelayDecoder.Config:
    """The torchtitan model config of `[model]`; `cpu` chooses the attention that runs there."""
    return FAMILIES[model.family].build(model, seed=seed, cpu=cpu)


def check_family(config: RunConfig, sources: Sources) -> None:
    """Raise `ConfigError` for a key that the family lacks, does not have, or has otherwise."""
    sources.refuse(config, check_limits(FAMILIES, config))
