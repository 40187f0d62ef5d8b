"""Strict reading of one value: TOML and command line alike must give exactly the key's type.

Nothing is converted silently, except an integer where a number with a fraction is meant. Wrong
values come back as a `ConfigError` that says what would be right, in the spelling to use; the words
for types, ranges and defaults serve ``--help`` and the documentation too.
"""

import dataclasses
import operator
import typing
from typing import Any

from titan_relay.config.errors import ConfigError, Place, either, shown, toml_value
from titan_relay.config.fields import (
    REQUIRED,
    Key,
    Rule,
    choices_of,
    fields_of,
    is_table,
    item_of,
    or_word_of,
)
from titan_relay.config.paths import read_path
from titan_relay.config.suggest import nearest
from titan_relay.config.toml import parse_value

_NUMBERS = (int, float, bool)
_LARGEST = {int: 2**63 - 1, float: 1e308}  # TOML's integers have 64 bits


def read_value(key: Key, raw: Any, place: Place) -> Any:
    """The value of `key` from `raw`, which is what tomllib gives; raises `ConfigError`."""
    return _read(key.type, key.rule, raw, place)


def read_fields(options: Any, owner: str) -> dict[str, Any]:
    """The fields of a dataclass that a program filled, each read as if a file had said it.

    owner: what to name in the place of the file. Fields that are not declared by `option` are left
    out. Raises `ConfigError`.
    """
    types = typing.get_type_hints(type(options))
    return {
        field.name: _read(
            types[field.name],
            field.metadata["rule"],
            getattr(options, field.name),
            Place(owner, field.name),
        )
        for field in dataclasses.fields(options)
        if "rule" in field.metadata
    }


def _read(annotation: Any, rule: Rule, raw: Any, place: Place) -> Any:
    words = or_word_of(annotation)
    if words is not None:
        if raw is words.value or raw == words.word:
            return words.value
        if words.inner not in _NUMBERS:
            return _read(words.inner, rule, raw, place)
        try:
            return _read(words.inner, rule, raw, place)
        except ConfigError:
            hint = "" if isinstance(raw, str) else _spelling(words.inner, raw)
            raise place.error(raw, f"must be {expectation(annotation, rule)}{hint}") from None
    if choices_of(annotation):
        return _read_choice(annotation, rule, raw, place)
    if item_of(annotation) is not None:
        return _read_list(annotation, rule, raw, place)
    if is_table(annotation):
        return _read_table(annotation, raw, place)
    if annotation in _NOUNS:
        return _read_plain(annotation, rule, raw, place)
    return _read_dict(annotation, rule, raw, place)


def _read_plain(annotation: Any, rule: Rule, raw: Any, place: Place) -> Any:
    """A boolean, an integer, a float or a string."""
    if rule.path and isinstance(raw, str):
        raw = read_path(raw, place)
    right = _is_of(annotation, raw)
    if annotation is str:
        right = right and (bool(raw.strip()) or not rule.not_empty)
    elif annotation is not bool:  # a NaN is not at most anything
        right = right and abs(raw) <= _LARGEST[annotation] and _within(rule, raw)
    if not right:
        raise _wrong(annotation, rule, raw, place)
    if annotation is str:
        try:
            raw.encode()
        except UnicodeEncodeError:
            raise place.error(raw, "must be UTF-8 text") from None
    return annotation(raw)


def _is_of(annotation: Any, raw: Any) -> bool:
    """An integer may stand for a float, and a boolean for neither."""
    allowed = (int, float) if annotation is float else annotation
    return isinstance(raw, allowed) and isinstance(raw, bool) == (annotation is bool)


def _read_choice(annotation: Any, rule: Rule, raw: Any, place: Place) -> str:
    if isinstance(raw, str) and raw in choices_of(annotation):
        return raw
    close = nearest(raw, choices_of(annotation)) if isinstance(raw, str) else None
    hint = f'; did you mean "{close}"?' if close else ""
    raise place.error(raw, f"must be {expectation(annotation, rule)}{hint}")


def _read_list(annotation: Any, rule: Rule, raw: Any, place: Place) -> tuple[Any, ...]:
    if not isinstance(raw, list) or (rule.not_empty and not raw):
        raise _wrong(annotation, rule, raw, place)
    item = item_of(annotation)
    item_rule = Rule(not_empty=True, path=rule.path)
    return tuple(_read(item, item_rule, each, place.item(i)) for i, each in enumerate(raw))


def _read_dict(annotation: Any, rule: Rule, raw: Any, place: Place) -> dict[str, int]:
    assert annotation == dict[str, int], annotation
    if not isinstance(raw, dict):
        raise _wrong(annotation, rule, raw, place)
    at_least_0 = Rule(at_least=0)
    return {
        name: _read_plain(int, at_least_0, number, place.below(shown(name)))
        for name, number in raw.items()
    }


def _read_table(cls: type, raw: Any, place: Place) -> Any:
    """One entry of a list of tables, such as ``[[data.mixture]]``."""
    known = {key.name: key for key in fields_of(cls, place.key)}
    if not isinstance(raw, dict):
        raise place.error(raw, f"must be a table with the keys {', '.join(known)}")
    for name, value in raw.items():
        if name not in known:
            close = nearest(name, known)
            fix = f"did you mean {close}?" if close else f"known here: {', '.join(known)}"
            raise place.below(name).error(value, f"unknown key; {fix}")
    for name, key in known.items():
        if name not in raw and key.default is REQUIRED:
            raise ConfigError(
                f"{place.source}: {place.key}.{name} is missing: "
                f"give {expectation(key.type, key.rule)}"
            )
    given = {name: read_value(known[name], raw[name], place.below(name)) for name in raw}
    return cls(**given)


# By field of a rule: its words, and what must hold between a value and it.
_BOUNDS = {
    "at_least": ("of at least", operator.ge),
    "above": ("above", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def _within(rule: Rule, value: float) -> bool:
    bounds = ((getattr(rule, name), holds) for name, (_, holds) in _BOUNDS.items())
    return value in rule.also or all(each is None or holds(value, each) for each, holds in bounds)


def _wrong(annotation: Any, rule: Rule, raw: Any, place: Place) -> ConfigError:
    return place.error(raw, f"must be {expectation(annotation, rule)}{_spelling(annotation, raw)}")


def _spelling(annotation: Any, raw: Any) -> str:
    """How to write what was probably meant, or ""."""
    if annotation is int and isinstance(raw, float) and raw.is_integer():
        return f"; write {int(raw)}"
    if annotation is int and isinstance(raw, int) and abs(raw) > _LARGEST[int]:
        return "; integers have 64 bits"
    if annotation is str and not isinstance(raw, str | list | dict):
        return f'; write "{shown(raw)}" in quotes'
    if item_of(annotation) is not None and isinstance(raw, str) and raw:
        return f"; write [{shown(raw)}]"
    if annotation in (bool, int, float) and isinstance(raw, str):
        unquoted = parse_value(raw.lower() if annotation is bool else raw)
        if _is_of(annotation, unquoted):
            return f"; write {shown(unquoted)} without quotes"
    return ""


_NOUNS = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}


def expectation(annotation: Any, rule: Rule) -> str:
    """What a value must be, to follow "must be": "an integer of at least 1 (or -1)"."""
    words = or_word_of(annotation)
    if words is not None:
        return f'{expectation(words.inner, rule)}, or "{words.word}"'
    if choices_of(annotation):
        return either([f'"{choice}"' for choice in choices_of(annotation)])
    if item_of(annotation) is not None:
        filled = "a list with at least one item, of " if rule.not_empty else "a list of "
        return filled + _plural(item_of(annotation))
    if annotation in _NOUNS:
        filled = " that is not empty" if rule.not_empty else ""
        return _NOUNS[annotation] + limits(rule) + filled
    return "a table of names and integers"


def limits(rule: Rule) -> str:
    """A rule's bounds as " of at least 1 and at most 5 (or -1)"; "" without bounds."""
    named = ((words, getattr(rule, name)) for name, (words, _) in _BOUNDS.items())
    bounds = [f"{words} {bound}" for words, bound in named if bound is not None]
    text = " " + " and ".join(bounds) if bounds else ""
    return text + "".join(f" (or {value})" for value in rule.also)


def short_type(annotation: Any, rule: Rule) -> str:
    """Type and limits as ``int of at least 1 or none``, ``a | b``, ``list of str``."""
    words = or_word_of(annotation)
    if words is not None:
        return f"{short_type(words.inner, rule)}, or {words.word}"
    if choices_of(annotation):
        return " | ".join(choices_of(annotation))
    if item_of(annotation) is not None:
        return f"list of {short_type(item_of(annotation), Rule(path=rule.path))}"
    if is_table(annotation):
        return "tables"
    if annotation in _NOUNS:
        return "path" if rule.path else str(annotation.__name__) + limits(rule)
    return "table of int"


def default_text(key: Key) -> str:
    """A key's default as TOML, or "required"."""
    return "required" if key.default is REQUIRED else toml_value(key.default)


def _plural(annotation: Any) -> str:
    if choices_of(annotation):
        return either([f'"{choice}"' for choice in choices_of(annotation)])
    if item_of(annotation) is not None:
        return f"lists of {_plural(item_of(annotation))}"
    return "tables" if is_table(annotation) else _PLURALS[annotation]
