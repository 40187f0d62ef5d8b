"""Values and whole configurations as TOML text.

The standard library reads TOML but does not write it. TOML has no null: a key that is unset is
written, and read back, as the string "none".
"""

import dataclasses
from typing import Any

from titan_relay.config.schema import RunConfig


class WrittenFloat(float):
    """A float that remembers how it was written, so that a message can show ``1e3``."""

    def __new__(cls, text: str) -> "WrittenFloat":
        made = super().__new__(cls, text)
        made.text = text
        return made

    text: str


def toml_value(value: Any) -> str:
    """One value on one line: scalars, lists, and dicts as inline tables."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        if not value:
            return "{}"
        items = (f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items())
        return "{ " + ", ".join(items) + " }"
    if isinstance(value, WrittenFloat):
        return value.text
    if isinstance(value, int | float):
        return repr(value)
    return str(value)  # dates and times, which only appear in messages


def toml_key(key: str) -> str:
    """A key, quoted unless it is a bare word."""
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else _quoted(key)


def to_toml(config: RunConfig) -> str:
    """A file that gives this configuration again; every key is written."""
    return _section("", config).lstrip("\n")


def _section(path: str, section: Any) -> str:
    scalars, tables = [], []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        below = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            tables.append(_section(below, value))
        elif _is_list_of_tables(value):
            tables.extend(_list_entry(below, entry) for entry in value)
        else:
            scalars.append(f"{field.name} = {toml_value(value)}\n")
    head = f"\n[{path}]\n" if path and scalars else ""
    return head + "".join(scalars) + "".join(tables)


def _list_entry(path: str, entry: Any) -> str:
    lines = (
        f"{field.name} = {toml_value(getattr(entry, field.name))}\n"
        for field in dataclasses.fields(entry)
    )
    return f"\n[[{path}]]\n" + "".join(lines)


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and dataclasses.is_dataclass(value[0])


def _quoted(text: str) -> str:
    short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return '"' + "".join(short.get(char) or _escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
