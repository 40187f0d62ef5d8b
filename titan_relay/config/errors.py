"""The one kind of error that a user's configuration can cause, and where a value came from.

A message is one line, ``SOURCE: KEY = VALUE: FIX``, with the value as TOML spells it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

COMMAND_LINE = "command line"
_LONGEST_VALUE = 100
_ITS_OWN: Any = object()


class ConfigError(ValueError):
    """A configuration that cannot run; ``str()`` is one line naming place, key, value and fix."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


@dataclass(frozen=True)
class Place:
    """Where a value was written: the file (or "command line") and the key."""

    source: str
    key: str

    def error(self, value: Any, fix: str, note: str = "") -> ConfigError:
        """``SOURCE: KEY = VALUE: FIX``; `note` follows the value, such as " (default)"."""
        return ConfigError(f"{self.source}: {self.key} = {shown(value)}{note}: {fix}")

    def item(self, index: int) -> "Place":
        """The place of one item of a list."""
        return Place(self.source, f"{self.key}[{index}]")

    def below(self, key: str) -> "Place":
        """The place of a key of a table."""
        return Place(self.source, f"{self.key}.{key}")


@dataclass(frozen=True)
class Setting:
    """One given value and where it was given: a file's name or "command line"."""

    value: Any
    source: str


class Refusal(NamedTuple):
    """A key that does not go with the others, and the fix; `value` where not the key's own."""

    key: str
    fix: str
    value: Any = _ITS_OWN


@dataclass(frozen=True)
class Origins:
    """Where every given key came from; the rest are defaults.

    main: the file to name for a key that was not given.
    """

    main: str
    given: Mapping[str, str] = field(default_factory=dict)

    def error(self, key: str, value: Any, fix: str) -> ConfigError:
        """An error about `key` that names its source, or the main file if it is a default."""
        source = self.given.get(key, self.main)
        option = f"--{key}" if source == COMMAND_LINE else key
        note = "" if key in self.given else " (default)"
        return Place(source, option).error(value, fix, note)

    def refuse(self, config: Any, *checks: Iterable[Refusal]) -> None:
        """Raise `ConfigError` for the first refusal of `config` that the checks find, or return.

        A check may rely on what earlier refusals rule out: it is not asked for a second one.
        """
        for key, fix, value in chain(*checks):
            raise self.error(key, attrgetter(key)(config) if value is _ITS_OWN else value, fix)


def shown(value: Any) -> str:
    """A value as TOML, cut where it is long."""
    text = toml_value(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def toml_value(value: Any) -> str:
    """A value on one line, as TOML spells it; None is "none"."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        items = (f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items())
        return "{ " + ", ".join(items) + " }" if value else "{}"
    if isinstance(value, bool | str | None):
        text = "none" if value is None else value
        return json.dumps(text, ensure_ascii=not str(text).isprintable())
    return str(value)


def _toml_key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else toml_value(key)


def either(words: Iterable[object]) -> str:
    """``a, b or c``."""
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]
