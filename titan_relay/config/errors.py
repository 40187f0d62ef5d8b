"""The one kind of error that a user's configuration can cause."""

from dataclasses import dataclass
from typing import Any

from titan_relay.config.toml_text import toml_value

COMMAND_LINE = "command line"
_LONGEST_VALUE = 100


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


def shown(value: Any) -> str:
    """A value as TOML, cut where it is long."""
    text = toml_value(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
