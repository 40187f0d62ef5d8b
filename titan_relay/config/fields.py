"""How a configuration key is declared, and what a declaration says.

A key is a dataclass field: its type is the annotation, its choices are a ``Literal``, its meaning
is the string below it, and `option` adds what Python has no notation for: ranges and the name in
torchtitan. Everything else (the strict reader, the command line, ``--help``, ``docs/config.md``) is
derived from these, so adding a field to the schema is all it takes to add a key.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

REQUIRED = dataclasses.MISSING


@dataclass(frozen=True)
class Rule:
    """Limits on one key, checked on every value whatever it came from.

    at_least, at_most: inclusive bounds. above, below: exclusive bounds.
    also: values accepted although they break the bounds, such as -1 for "all".
    not_empty: an empty string or list is refused.
    path: names a file or a folder, or a list of them: `~` and variables are expanded.
    needs: a condition, or several of which one must hold, without which nothing reads the key:
        ``KEY`` (is set), ``KEY = VALUE`` or ``KEY > NUMBER``, KEY of the same section or dotted.
    request: to set it is to ask for something, which is an error where `needs` does not hold.
    titan: the torchtitan field this key sets where the name differs from the key's own;
        "" for a key that torchtitan does not know.
    """

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()
    not_empty: bool = False
    path: bool = False
    needs: str | tuple[str, ...] = ()
    request: bool = False
    titan: str | None = None


def option(default: Any = dataclasses.MISSING, **rule: Any) -> Any:
    """A dataclass field holding a `Rule`; without a default the key is required."""
    metadata = {"rule": Rule(**rule)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(factory: Callable[[], Any], **rule: Any) -> Any:
    """A dataclass field holding a sub-table; `factory` makes its default.

    rule: `needs`, of its own keys or dotted, and `request`, of all its keys and those below.
    """
    return dataclasses.field(default_factory=factory, metadata={"rule": Rule(**rule)})


@dataclass(frozen=True)
class Key:
    """One key: dotted path, type annotation, rule, default (`REQUIRED` if none), meaning.

    needs: conditions on dotted paths, its sections' among them; of each group one must hold.
    """

    path: str
    type: Any
    rule: Rule
    default: Any
    meaning: str
    needs: tuple[tuple[str, ...], ...] = ()

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def section(self) -> str:
        """The path without its last part; "" for a key outside every section."""
        return self.path.rpartition(".")[0]


def is_table(annotation: Any) -> typing.TypeGuard[type]:
    """Whether a type is a dataclass, and so has keys below it."""
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def sections_in(cls: type) -> dict[str, type]:
    """Dataclass of every section of `cls` by its dotted path; "" is `cls` itself."""
    return {"": cls} | {key.path: key.type for key in _all_fields(cls) if is_table(key.type)}


def keys_in(cls: type) -> dict[str, Key]:
    """Every key of `cls` and its sections by its dotted path, in the order of declaration."""
    return {key.path: key for key in _all_fields(cls) if not is_table(key.type)}


def _all_fields(cls: type, path: str = "", above: Key | None = None) -> Iterator[Key]:
    """Keys and sections, each section before its keys, with what sections ask of their keys."""
    for key in fields_of(cls, path, REQUIRED if above is None else above.default):
        if above is not None:
            groups = (each for each in above.needs if not _are_about(key.path, each))
            rule = dataclasses.replace(key.rule, request=key.rule.request or above.rule.request)
            key = dataclasses.replace(key, rule=rule, needs=(*groups, *key.needs))
        yield key
        if is_table(key.type):
            yield from _all_fields(key.type, key.path, key)


def _are_about(path: str, conditions: tuple[str, ...]) -> bool:
    return any(each.partition(" ")[0] == path for each in conditions)


def _needs(rule: Rule, section: str) -> tuple[tuple[str, ...], ...]:
    """The conditions of a rule, on dotted paths."""
    group = (rule.needs,) if isinstance(rule.needs, str) else rule.needs
    dotted = (each if "." in each.partition(" ")[0] else f"{section}.{each}" for each in group)
    return (tuple(dotted),) if group else ()


def fields_of(cls: type, prefix: str, defaults: Any = REQUIRED) -> list[Key]:
    """The fields of one dataclass as keys below `prefix`, sections included.

    defaults: an instance whose values are the defaults, or `REQUIRED` for the class's own.
    """
    hints = typing.get_type_hints(cls)
    meanings = _meanings(cls)

    def key_of(field: Any) -> Key:
        path = f"{prefix}.{field.name}" if prefix else field.name
        rule, type_ = field.metadata["rule"], hints[field.name]
        needs = _needs(rule, path if is_table(type_) else prefix)
        return Key(path, type_, rule, _default(field, defaults), meanings[field.name], needs)

    return [key_of(field) for field in dataclasses.fields(cls)]


class OrWord(typing.NamedTuple):
    """A type with one word beside it: ``T | None`` (written "none") or ``T | Literal["auto"]``."""

    inner: Any
    word: str
    value: Any


def or_word_of(annotation: Any) -> OrWord | None:
    """The parts of ``T | None`` or ``T | Literal["word"]``; None for any other type."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return None
    parts = typing.get_args(annotation)
    words = [part for part in parts if part is type(None) or choices_of(part)]
    (inner,) = [part for part in parts if part not in words]
    (word,) = words
    if word is type(None):
        return OrWord(inner, "none", None)
    (choice,) = choices_of(word)
    return OrWord(inner, choice, choice)


def choices_of(annotation: Any) -> tuple[str, ...]:
    """The values of a ``Literal``, else ()."""
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


def item_of(annotation: Any) -> Any:
    """``T`` for ``tuple[T, ...]``, else None."""
    if typing.get_origin(annotation) is not tuple:
        return None
    return typing.get_args(annotation)[0]


def _default(field: Any, defaults: Any) -> Any:
    if defaults is not REQUIRED:
        return getattr(defaults, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@functools.cache
def _meanings(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass and its bases, as one line of text."""
    found: dict[str, str] = {}
    for base in cls.__bases__:
        if dataclasses.is_dataclass(base):
            found |= _meanings(base)
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    assert isinstance(tree.body[0], ast.ClassDef)
    body = tree.body[0].body
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(following, ast.Expr), f"{cls.__name__}.{statement.target.id}"
            assert isinstance(following.value, ast.Constant), f"{statement.target.id}"
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found
