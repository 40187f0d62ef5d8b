"""Every configuration key by its dotted path, derived from the schema's dataclasses.

The reader, the command line, ``--help`` and the documentation all work from `keys()`, so that
adding a field to the schema is all it takes to add a key.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from dataclasses import dataclass
from typing import Any

from titan_relay.config.option import Rule
from titan_relay.config.schema import RunConfig

REQUIRED = dataclasses.MISSING


@dataclass(frozen=True)
class Key:
    """One key: dotted path, type annotation, rule, default (`REQUIRED` if none), meaning."""

    path: str
    type: Any
    rule: Rule
    default: Any
    meaning: str

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def section(self) -> str:
        """The path without its last part; "" for a key outside every section."""
        return self.path.rpartition(".")[0]


@functools.cache
def sections() -> dict[str, type]:
    """Dataclass of every section by its dotted path; "" is the file's top level."""
    found: dict[str, type] = {}
    _collect_sections("", RunConfig, found)
    return found


@functools.cache
def keys() -> dict[str, Key]:
    """Every key by its dotted path, in the order of the schema."""
    found: dict[str, Key] = {}
    _collect_keys("", RunConfig, REQUIRED, found)
    return found


def fields_of(cls: type, prefix: str, defaults: Any = REQUIRED) -> list[Key]:
    """The fields of one dataclass as keys below `prefix`, sections included.

    defaults: an instance whose values are the defaults, or `REQUIRED` for the class's own.
    """
    hints = typing.get_type_hints(cls)
    meanings = _meanings(cls)
    return [
        Key(
            path=f"{prefix}.{field.name}" if prefix else field.name,
            type=hints[field.name],
            rule=field.metadata["rule"],
            default=_default(field, defaults),
            meaning=meanings[field.name],
        )
        for field in dataclasses.fields(cls)
    ]


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


def _collect_sections(path: str, cls: type, found: dict[str, type]) -> None:
    found[path] = cls
    for key in fields_of(cls, path):
        if dataclasses.is_dataclass(key.type):
            assert isinstance(key.type, type)
            _collect_sections(key.path, key.type, found)


def _collect_keys(path: str, cls: type, defaults: Any, found: dict[str, Key]) -> None:
    for key in fields_of(cls, path, defaults):
        if dataclasses.is_dataclass(key.type):
            assert isinstance(key.type, type)
            _collect_keys(key.path, key.type, key.default, found)
        else:
            found[key.path] = key


@functools.cache
def _meanings(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass, as one line of text."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    assert isinstance(tree.body[0], ast.ClassDef)
    body = tree.body[0].body
    found = {}
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(following, ast.Expr), f"{cls.__name__}.{statement.target.id}"
            assert isinstance(following.value, ast.Constant), f"{statement.target.id}"
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found
