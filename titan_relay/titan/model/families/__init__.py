"""Model families: each file turns the numbers of `[model]` into a torchtitan model, and says which
numbers it has and what Hugging Face calls them and its weights.

What families share is in `decoder` (the model and its block), `parts` (everything inside),
`adapter` (names of weights) and `architecture` (names of numbers).
"""

from __future__ import annotations

from importlib import import_module
from typing import get_args

from titan_relay.config import Origins, RunConfig
from titan_relay.config.schema import ModelConfig
from titan_relay.config.schema_model import FamilyName
from titan_relay.titan.model.families.decoder import RelayDecoder
from titan_relay.titan.model.families.family import Family, check_limits

# Their names have one home, the configuration, which loads without torch; each is a file here.
FAMILIES: dict[str, Family] = {
    name: import_module(f"{__name__}.{name}").FAMILY for name in get_args(FamilyName)
}


def build_model_config(model: ModelConfig, *, seed: int, cpu: bool) -> RelayDecoder.Config:
    """The torchtitan model config of `[model]`; `cpu` chooses the attention that runs there."""
    return FAMILIES[model.family].build(model, seed=seed, cpu=cpu)


def check_family(config: RunConfig, origins: Origins) -> None:
    """Raise `ConfigError` for a key that the family lacks, does not have, or has otherwise."""
    origins.refuse(config, check_limits(FAMILIES, config))
