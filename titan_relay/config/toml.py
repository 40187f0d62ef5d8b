"""TOML as text: files and single values read, with plainer messages; whole configurations written.

A byte-order mark at the start of a file, which some editors write, is dropped; any encoding other
than UTF-8 is refused. TOML has no null: a key that is unset is written, and read back, as the
string "none".
"""

import codecs
import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_relay.config.errors import ConfigError, Place
from titan_relay.config.schema import RunConfig
from titan_relay.config.suggest import nearest

_PLAINER = {
    "Cannot overwrite a value": "this key is already set above; keep one of them",
    "Invalid initial character for a key part": "not a key; a key is a word, such as steps = 5",
    "Expected '=' after a key in a key/value pair": "a key needs = and a value after it",
    "Expected newline or end of document after a statement": "one key = value per line",
    "Invalid value": "not a TOML value; text goes in quotes",
    r"Illegal character '\n'": "text in quotes must end on its line",
}


class WrittenFloat(float):
    """A float that is shown as it was written, so that a message can say ``1e3``."""

    def __new__(cls, text: str) -> "WrittenFloat":
        made = super().__new__(cls, text)
        made.text = text
        return made

    text: str

    def __str__(self) -> str:
        return self.text


def to_toml(config: RunConfig) -> str:
    """A file that gives this configuration again; every key is written."""
    return dump_tables(dataclasses.asdict(config))


def dump_tables(tables: Mapping[str, Any]) -> str:
    """Nested dicts, lists and scalars as a file; None is written as "none"."""
    # Not at the top: the layer reads its declarations in this package, and needs torch alone.
    import tomli_w

    return tomli_w.dumps(_without_null(tables))


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_null(item) for name, item in value.items()}
    return "none" if value is None else value


def parse_value(text: str) -> Any:
    """The TOML value that `text` spells, or None where it spells none."""
    try:
        parsed = tomllib.loads(f"v = {text}", parse_float=WrittenFloat)
    except (ValueError, RecursionError):
        return None
    return parsed["v"] if list(parsed) == ["v"] else None


def read_toml(path: Path, named_at: Place) -> dict[str, Any]:
    """The tables of one file; raises `ConfigError`, at `named_at` if it cannot be opened."""
    return _parse(_decode(_read_bytes(path, named_at), path), path)


def _read_bytes(path: Path, named_at: Place) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise named_at.error(str(path), f"no such file{_similar_file(path)}") from None
    except IsADirectoryError:
        raise named_at.error(str(path), "is a folder; name a .toml file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise named_at.error(str(path), f"cannot be read ({reason})") from None


def _similar_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}"
    close = nearest(path.name, [each.name for each in path.parent.glob("*.toml")])
    return f"; did you mean {path.parent / close}?" if close else ""


def _decode(content: bytes, path: Path) -> str:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{path}: line 1: the file is UTF-16; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: line {line}: byte 0x{content[error.start]:02x} is not UTF-8; "
            "save the file as UTF-8"
        ) from None


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text, parse_float=WrittenFloat)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(str(error), text, path) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from None


def _syntax_error(message: str, text: str, path: Path) -> ConfigError:
    """``FILE: line N: "THE LINE": what is wrong`` from tomllib's message."""
    lines = text.splitlines() or [""]
    found = re.search(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$", message)
    number = int(found[1]) if found and found[1] else len(lines)
    line = lines[min(number, len(lines)) - 1].strip()
    reason = message[: found.start()] if found else message
    python_word = re.search(r"=\s*(True|False|None)\b", line)
    if python_word:
        toml_word = {"None": '"none"'}.get(python_word[1], python_word[1].lower())
        reason = f"TOML spells {python_word[1]} as {toml_word}"
    elif reason.startswith("Cannot declare"):
        reason = "this table is already there above; put its keys into one"
    return ConfigError(f"{path}: line {number}: {line}: {_PLAINER.get(reason, reason)}")
