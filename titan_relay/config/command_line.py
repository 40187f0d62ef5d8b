"""The command line: ``--config FILE``, ``--section.key value``, ``--print-config``, ``--plan``,
``--help``.

Written against the schema rather than with an argument parser: argparse and tyro abbreviate,
convert and report in several lines with a usage text, and tyro takes defaults from a file
unchecked (``steps = "100"`` stays a string), whereas here file and command line share one strict
reader and one form of error.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_relay.config.errors import COMMAND_LINE, ConfigError, Place, Setting, shown
from titan_relay.config.fields import choices_of, is_table, item_of, or_word_of
from titan_relay.config.reader import expectation, read_value
from titan_relay.config.schema import keys, sections
from titan_relay.config.suggest import nearest, where_key_belongs
from titan_relay.config.toml import parse_value

_SWITCHES = ("print-config", "plan")  # what may be asked for besides a run
_OPTIONS = ("config", *_SWITCHES, "help", "dump_folder")


@dataclass(frozen=True)
class CommandLine:
    """What a command line asks for; `settings` are its ``--section.key value`` pairs."""

    config_file: str | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    print_config: bool = False
    plan: bool = False
    help: bool = False


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Read arguments (without the program's name); raises `ConfigError`.

    Of a key given twice the last value counts, so that a script can append to its arguments.
    """
    if any(argument in ("--help", "-h") for argument in argv):
        return CommandLine(help=True)
    config_file = None
    asked = dict.fromkeys(_SWITCHES, False)
    settings: dict[str, Setting] = {}
    for name, text in _pairs(argv):
        if name == "config":
            if config_file is not None:
                raise Place(COMMAND_LINE, "--config").error(
                    text, f"{config_file} is given too; name one, which can extend a base file"
                )
            config_file = _needed(name, text)
        elif name in _SWITCHES:
            if text is not None:
                raise Place(COMMAND_LINE, f"--{name}").error(text, "takes no value")
            asked[name] = True
        else:
            settings[name] = _setting(name, text)
    return CommandLine(config_file, settings, asked["print-config"], asked["plan"])


def _pairs(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Names without dashes, each with its text, or None where none follows."""
    rest, last = list(argv), ""
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            raise ConfigError(
                f"{COMMAND_LINE}: {shown(argument)}: not an option; write --section.key value"
                f"{_hint_to_quote(last)}"
            )
        last = name
        if equals:
            yield name, text
        elif name not in _SWITCHES and rest and not rest[0].startswith("--"):
            yield name, rest.pop(0)
        else:
            yield name, None


def _hint_to_quote(last: str) -> str:
    """What to add for an argument that follows the value of a key that takes patterns of files."""
    if last not in keys() or item_of(keys()[last].type) is not str:
        return ""
    return f"; if the shell has expanded a pattern, quote it: --{last} 'FOLDER/*.jsonl'"


def _setting(name: str, text: str | None) -> Setting:
    place = Place(COMMAND_LINE, f"--{name}")
    if name in sections():
        raise ConfigError(
            f"{COMMAND_LINE}: --{name}: is a section; name one of its keys, "
            f"such as --{next(path for path in keys() if path.startswith(name + '.'))}"
        )
    if name not in keys():
        underscored = name.replace("-", "_")
        fix = f"did you mean {underscored}?" if underscored in keys() else where_key_belongs(name)
        option = nearest(name, _OPTIONS)
        if option is not None and "." not in name:
            fix = f"did you mean --{option}?"
        given = "" if text is None else f" {shown(text)}"
        raise ConfigError(f"{COMMAND_LINE}: --{name}{given}: unknown key; {fix}")
    key = keys()[name]
    if text is None and key.type is bool:
        return Setting(True, COMMAND_LINE)
    return Setting(read_value(key, _raw(key.type, _needed(name, text)), place), COMMAND_LINE)


def _needed(name: str, text: str | None) -> str:
    if text is not None and (text or name != "config"):
        return text
    wanted = "a file" if name == "config" else expectation(keys()[name].type, keys()[name].rule)
    raise ConfigError(f"{COMMAND_LINE}: --{name}: needs a value, {wanted}")


def _raw(annotation: Any, text: str) -> Any:
    """What TOML would give for `text`; the text itself where it has not the type's form."""
    either = or_word_of(annotation)
    if either is not None:
        return text if text == either.word else _raw(either.inner, text)
    if annotation is str or choices_of(annotation):
        return text
    item, is_nested = item_of(annotation), text.lstrip().startswith(("[", "{"))
    if item is None or text.lstrip().startswith("["):
        value = parse_value(text)
        if value is None and is_nested:
            value = _parse_json(text)
        return text if value is None else value
    if item_of(item) is not None or is_table(item):
        return text
    return [_raw(item, part.strip()) for part in text.split(",")] if text.strip() else []


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
