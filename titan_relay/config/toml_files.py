"""Reading TOML files, with the `base` files that they extend.

Every file is checked by itself, so that an error names the file that has it. A byte-order mark at
the start, which some editors write, is dropped; any encoding other than UTF-8 is refused.
"""

import codecs
import re
import tomllib
from pathlib import Path
from typing import Any

from titan_relay.config.errors import COMMAND_LINE, ConfigError, Place
from titan_relay.config.settings import Setting, read_tables
from titan_relay.config.suggest import nearest
from titan_relay.config.toml_text import WrittenFloat

_BASE = "base"
_PLAINER = {
    "Cannot overwrite a value": "this key is already set above; keep one of them",
    "Invalid initial character for a key part": "not a key; a key is a word, such as steps = 5",
    "Expected '=' after a key in a key/value pair": "a key needs = and a value after it",
    "Expected newline or end of document after a statement": "one key = value per line",
}


def read_file(path: str) -> dict[str, Setting]:
    """The settings of a file over those of its base files; raises `ConfigError`."""
    return _read(Path(path), Place(COMMAND_LINE, "--config"), ())


def _read(path: Path, named_at: Place, chain: tuple[Path, ...]) -> dict[str, Setting]:
    content = _read_bytes(path, named_at)
    if any(path.samefile(each) for each in chain):
        circle = " -> ".join(str(each) for each in (*chain, path))
        raise named_at.error(str(path), f"extends itself ({circle}); remove one of these bases")
    tables = _parse(_decode(content, path), path)
    bases = _base_files(tables.pop(_BASE, []), Place(str(path), _BASE))
    settings: dict[str, Setting] = {}
    for index, base in enumerate(bases):
        place = (
            Place(str(path), _BASE) if len(bases) == 1 else Place(str(path), f"{_BASE}[{index}]")
        )
        settings.update(_read(path.parent / base, place, (*chain, path)))
    return settings | read_tables(tables, str(path))


def _base_files(raw: Any, place: Place) -> list[str]:
    names = [raw] if isinstance(raw, str) else raw
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise place.error(raw, "must be the name of a file, or a list of names")
    return names


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
    elif reason == "Invalid value":
        reason = "not a TOML value; text goes in quotes"
    elif reason == r"Illegal character '\n'":
        reason = "text in quotes must end on its line"
    return ConfigError(f"{path}: line {number}: {line}: {_PLAINER.get(reason, reason)}")
