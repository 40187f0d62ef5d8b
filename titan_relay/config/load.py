"""From arguments or a file to one `RunConfig`: command line over file over base over default.

A file or a command line is a flat mapping from dotted path to `Setting`. Later mappings override
earlier ones key by key (lists and tables of ids as a whole), which is all there is to precedence.
Every file is checked by itself, so that an error names the file that has it. Nothing here prints
or exits, and nothing imports torch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_relay.config.command_line import CommandLine, parse_command_line
from titan_relay.config.errors import COMMAND_LINE, ConfigError, Origins, Place, Setting
from titan_relay.config.fields import REQUIRED
from titan_relay.config.paths import read_path
from titan_relay.config.reader import expectation, read_value
from titan_relay.config.schema import RunConfig, keys, sections
from titan_relay.config.suggest import where_key_belongs, where_section_belongs
from titan_relay.config.toml import read_toml

_BASE = "base"
Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class Loaded:
    """A configuration and where its values came from, for `validate` and its messages."""

    config: RunConfig
    origins: Origins
    print_config: bool = False
    plan: bool = False


def load_config(argv: Sequence[str]) -> Loaded:
    """Read arguments such as ``["--config", "a.toml", "--training.steps", "5"]``.

    The values are of the right types and ranges; `validate` checks that they go together.
    Raises `ConfigError`. ``--help`` is the caller's: see `parse_command_line`.
    """
    return load(parse_command_line(argv))


def load(command: CommandLine) -> Loaded:
    """The configuration that a parsed command line asks for; raises `ConfigError`."""
    if command.config_file is None:
        raise ConfigError(
            f"{COMMAND_LINE}: --config is missing: name a TOML file, as in --config FILE.toml"
        )
    named_at = Place(COMMAND_LINE, "--config")
    main = read_path(command.config_file, named_at)
    settings = _read_over_bases(Path(main), named_at, ()) | dict(command.settings)
    given = {name: setting.source for name, setting in settings.items()}
    config = build(settings, main)
    origins = Origins(main, given)
    return Loaded(config, origins, command.print_config, command.plan)


def _read_over_bases(path: Path, named_at: Place, chain: tuple[Path, ...]) -> dict[str, Setting]:
    """The settings of a file over those of its base files."""
    tables = read_toml(path, named_at)
    if any(path.samefile(each) for each in chain):
        circle = " -> ".join(str(each) for each in (*chain, path))
        raise named_at.error(str(path), f"extends itself ({circle}); remove one of these bases")
    place = Place(str(path), _BASE)
    bases = _base_files(tables.pop(_BASE, []), place)
    settings: dict[str, Setting] = {}
    for index, base in enumerate(bases):
        named = place if len(bases) == 1 else place.item(index)
        settings |= _read_over_bases(path.parent / read_path(base, named), named, (*chain, path))
    return settings | read_tables(tables, str(path))


def _base_files(raw: Any, place: Place) -> list[str]:
    names = [raw] if isinstance(raw, str) else raw
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise place.error(raw, "must be the name of a file, or a list of names")
    return names


def read_tables(tables: Mapping[str, Any], source: str, section: str = "") -> dict[str, Setting]:
    """The settings in the nested tables of one file, or of a section; raises `ConfigError`."""
    found: dict[str, Setting] = {}
    for name, raw in tables.items():
        path = f"{section}.{name}" if section else name
        place = Place(source, path)
        if path in keys():
            found[path] = Setting(read_value(keys()[path], raw, place), source)
        elif path in sections():
            if not isinstance(raw, dict):
                raise place.error(raw, f"is a section; write [{path}] and its keys below it")
            found |= read_tables(raw, source, path)
        elif isinstance(raw, dict):
            raise ConfigError(f"{source}: [{path}]: unknown section; {where_section_belongs(path)}")
        else:
            raise place.error(raw, f"unknown key; {where_key_belongs(path)}")
    return found


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
        else:
            given = settings.get(below)
            values[field.name] = keys()[below].default if given is None else given.value
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
