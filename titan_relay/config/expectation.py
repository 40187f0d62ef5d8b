"""Types, ranges and defaults of keys in words, for messages, ``--help`` and the documentation."""

import dataclasses
from typing import Any

from titan_relay.config.keys import REQUIRED, Key, choices_of, item_of, or_word_of
from titan_relay.config.option import Rule
from titan_relay.config.toml_text import toml_value

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
    bounds = []
    if rule.at_least is not None:
        bounds.append(f"of at least {rule.at_least}")
    if rule.above is not None:
        bounds.append(f"above {rule.above}")
    if rule.at_most is not None:
        bounds.append(f"at most {rule.at_most}")
    if rule.below is not None:
        bounds.append(f"below {rule.below}")
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
        return f"list of {short_type(item_of(annotation), Rule())}"
    if dataclasses.is_dataclass(annotation):
        return "tables"
    if annotation in _NOUNS:
        return str(annotation.__name__) + limits(rule)
    return "table of int"


def default_text(key: Key) -> str:
    """A key's default as TOML, or "required"."""
    return "required" if key.default is REQUIRED else toml_value(key.default)


def either(words: list[str]) -> str:
    """``a, b or c``."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _plural(annotation: Any) -> str:
    if choices_of(annotation):
        return either([f'"{choice}"' for choice in choices_of(annotation)])
    if item_of(annotation) is not None:
        return f"lists of {_plural(item_of(annotation))}"
    return "tables" if dataclasses.is_dataclass(annotation) else _PLURALS[annotation]
