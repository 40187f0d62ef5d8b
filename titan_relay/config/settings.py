"""Values as they were given, with their sources; and how they become a `RunConfig`.

A file or a command line is a flat mapping from dotted path to `Setting`. Later mappings override
earlier ones key by key (lists and tables of ids as a whole), which is all there is to precedence.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_relay.config.errors import COMMAND_LINE, ConfigError, Place
from titan_relay.config.expectation import expectation
from titan_relay.config.keys import REQUIRED, keys, sections
from titan_relay.config.schema import RunConfig
from titan_relay.config.suggest import where_key_belongs, where_section_belongs
from titan_relay.config.values import read_value


@dataclass(frozen=True)
class Setting:
    """One given value and where it was given: a file's name or "command line"."""

    value: Any
    source: str


Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class Sources:
    """Where every given key came from; the rest are defaults.

    main: the file to name for a key that was not given.
    """

    main: str
    given: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def error(self, key: str, value: Any, fix: str) -> ConfigError:
        """An error about `key` that names its source, or the main file if it is a default."""
        source = self.given.get(key, self.main)
        option = f"--{key}" if source == COMMAND_LINE else key
        note = "" if key in self.given else " (default)"
        return Place(source, option).error(value, fix, note)


def read_tables(tables: Mapping[str, Any], source: str) -> dict[str, Setting]:
    """The settings in the nested tables of one file; raises `ConfigError`."""
    found: dict[str, Setting] = {}
    _read_section("", tables, source, found)
    return found


def _read_section(
    section: str, table: Mapping[str, Any], source: str, found: dict[str, Setting]
) -> None:
    for name, raw in table.items():
        path = f"{section}.{name}" if section else name
        place = Place(source, path)
        if path in keys():
            found[path] = Setting(read_value(keys()[path], raw, place), source)
        elif path in sections():
            if not isinstance(raw, dict):
                raise place.error(raw, f"is a section; write [{path}] and its keys below it")
            _read_section(path, raw, source, found)
        elif isinstance(raw, dict):
            raise ConfigError(f"{source}: [{path}]: unknown section; {where_section_belongs(path)}")
        else:
            raise place.error(raw, f"unknown key; {where_key_belongs(path)}")


def build(settings: Settings, main: str) -> RunConfig:
    """The configuration that `settings` and the defaults give; a required key must be there."""
    missing = [
        key for key in keys().values() if key.default is REQUIRED and key.path not in settings
    ]
    if missing:
        first = missing[0]
        more = ", ".join(key.path for key in missing[1:])
        raise ConfigError(
            f"{main}: {first.path} is missing: it has no default; give "
            f"{expectation(first.type, first.rule)}" + (f" (missing too: {more})" if more else "")
        )
    built: RunConfig = _build_section("", settings)
    return built


def _build_section(path: str, settings: Settings) -> Any:
    cls = sections()[path]
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        below = f"{path}.{field.name}" if path else field.name
        if below in sections():
            values[field.name] = _build_section(below, settings)
        elif below in settings:
            values[field.name] = settings[below].value
        else:
            values[field.name] = keys()[below].default
    return cls(**values)


def with_settings(run: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The configuration with keys such as "training.seq_len" set, and sections as a whole."""
    for path, value in changes.items():
        run = _with(run, path.split("."), value)
    return run


def _with(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if rest:
        value = _with(getattr(section, name), rest, value)
    return dataclasses.replace(section, **{name: value})


def with_length(run: RunConfig, seq_len: int) -> RunConfig:
    """The run with one sequence of `seq_len` at a time, not accumulated, and tables to match."""
    changes = {
        "training.seq_len": seq_len,
        "training.local_batch_size": 1,
        "training.global_batch_size": -1,
        "model.max_seq_len": max(seq_len, run.model.max_seq_len),
    }
    return with_settings(run, changes)
