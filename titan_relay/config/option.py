"""How a configuration key is declared: a dataclass field with a range, choices and a meaning.

A key's type is its annotation, its choices are a ``Literal``, its meaning is the string below
it, and `option` adds what Python has no notation for: ranges and the name in torchtitan.
Everything else (the strict reader, ``--help``, ``docs/config.md``) is derived from these.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """Limits on one key, checked on every value whatever it came from.

    at_least, at_most: inclusive bounds. above, below: exclusive bounds.
    also: values accepted although they break the bounds, such as -1 for "all".
    not_empty: an empty string or list is refused.
    titan: the torchtitan field this key sets where the name differs from the key's own;
        "" for a key that torchtitan does not know.
    """

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()
    not_empty: bool = False
    titan: str | None = None


def option(default: Any = dataclasses.MISSING, **rule: Any) -> Any:
    """A dataclass field holding a `Rule`; without a default the key is required."""
    metadata = {"rule": Rule(**rule)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(factory: Callable[[], Any]) -> Any:
    """A dataclass field holding a sub-table; `factory` makes its default."""
    return dataclasses.field(default_factory=factory, metadata={"rule": Rule()})
