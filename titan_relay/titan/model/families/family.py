"""What a family is, as one record, and whether a configuration keeps to it.

A key of `[model]` that not every family has is neutral where it means nothing. What is left out is
refused just like what is too much: a number that nothing reads would be a silent mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from titan_relay.config import RunConfig
from titan_relay.config.errors import Refusal, either
from titan_relay.config.schema import keys
from titan_relay.titan.model.families.architecture import Architecture
from titan_relay.titan.model.families.decoder import RelayDecoder

# What only sparsemixer differs from: a key, its values, and what is wrong with others.
SCORED: dict[str, tuple[tuple[Any, ...], str]] = {
    "model.moe.score_func": (
        ("softmax", "sigmoid"),
        'has no such routing; use "softmax" or "sigmoid"',
    )
}


@dataclass(frozen=True)
class Family:
    """How one architecture is built, what `[model]` may say of it, and its Hugging Face names.

    build: `(model, seed=, cpu=)` to the torchtitan model config.
    adapter: maps a state dict to the names of weights in Hugging Face's files and back.
    architectures: the classes of `transformers` that compute it; the first is the one written.
    needs: keys of `[model]` that not every family has, and this one cannot do without.
    may_have: such keys that it can do without.
    only: values that a key must have here, and what to say of others after the family's name.
    """

    build: Callable[..., RelayDecoder.Config]
    adapter: type[BaseStateDictAdapter]
    architectures: tuple[Architecture, ...]
    needs: tuple[str, ...]
    may_have: tuple[str, ...] = ()
    only: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=lambda: SCORED)

    @property
    def parts(self) -> tuple[str, ...]:
        """Keys of `[model]` that it has and not every family."""
        return (*self.needs, *self.may_have)


def check_limits(families: Mapping[str, Family], config: RunConfig) -> Iterator[Refusal]:
    """Yield a `Refusal` for a key that the family lacks, does not have, or has otherwise.

    families: all there are, by name; the keys of the others are refused.
    """
    name, family = config.model.family, families[config.model.family]
    for path in dict.fromkeys(path for each in families.values() for path in each.parts):
        value = attrgetter(path)(config)
        owners = [owner for owner, each in families.items() if path in each.parts]
        if name not in owners and value != keys()[path].default:
            others = f"(it is for {either(owners)}); leave it out"
            yield Refusal(path, f'family "{name}" has no such part {others}')
        if path in family.needs and not value:
            yield Refusal(path, f'family "{name}" needs it; give it as it is in the model')
    for path, (allowed, otherwise) in family.only.items():
        if attrgetter(path)(config) not in allowed:
            yield Refusal(path, f'family "{name}" {otherwise}')
