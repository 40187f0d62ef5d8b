"""``--print-config`` gives a file that gives the same configuration, whatever it is."""

import dataclasses
import json
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from titan_relay.config import RunConfig, load_config, to_toml
from titan_relay.config.errors import Setting
from titan_relay.config.fields import Key, Rule, choices_of, fields_of, item_of, or_word_of
from titan_relay.config.load import build
from titan_relay.config.schema import keys

# Surrogates are no text; "none" and blank strings have a meaning of their own.
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_NAMES = _TEXT.filter(lambda text: text.strip() and text != "none")
# A path that was read has neither: both have been replaced by what they stand for.
_PATHS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="~$"), max_size=12
).filter(lambda text: text.strip() and text != "none")


def _number(kind: type, rule: Rule) -> st.SearchStrategy[Any]:
    bounds = {
        "min_value": rule.at_least if rule.at_least is not None else rule.above,
        "max_value": rule.at_most if rule.at_most is not None else rule.below,
    }
    if kind is int:
        numbers: st.SearchStrategy[Any] = st.integers(bounds["min_value"] or 0, 2**63 - 1)
    else:
        open_ends = {
            "exclude_min": rule.above is not None,
            "exclude_max": rule.below is not None,
        }
        numbers = st.floats(**bounds, **open_ends, allow_nan=False, allow_infinity=False).filter(
            lambda number: abs(number) <= 1e308
        )
    return numbers | st.sampled_from(rule.also) if rule.also else numbers


def _values(annotation: Any, rule: Rule) -> st.SearchStrategy[Any]:
    words = or_word_of(annotation)
    if words is not None:
        return st.just(words.value) | _values(words.inner, rule)
    if choices_of(annotation):
        return st.sampled_from(choices_of(annotation))
    if item_of(annotation) is not None:
        items = _values(item_of(annotation), Rule(not_empty=True, path=rule.path))
        return st.lists(items, min_size=int(rule.not_empty), max_size=3).map(tuple)
    if dataclasses.is_dataclass(annotation):
        assert isinstance(annotation, type)
        fields = {key.name: _values(key.type, key.rule) for key in fields_of(annotation, "")}
        return st.builds(annotation, **fields)
    if annotation is bool:
        return st.booleans()
    if annotation is str:
        names = _PATHS if rule.path else _NAMES
        return names if rule.not_empty else names | st.just("")
    if annotation in (int, float):
        return _number(annotation, rule)
    return st.dictionaries(_TEXT, st.integers(0, 10**6), max_size=3)


_CONFIGS = st.fixed_dictionaries(
    {path: _values(key.type, key.rule) for path, key in keys().items()}
).map(lambda values: build({path: Setting(v, "test") for path, v in values.items()}, "test"))


def _reread(config: RunConfig, *argv: str) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "printed.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        return load_config(["--config", str(path), *argv]).config


@settings(max_examples=60, deadline=None)
@given(_CONFIGS)
def test_printed_configuration_gives_itself(config: RunConfig) -> None:
    again = _reread(config)
    assert again == config
    assert to_toml(again) == to_toml(config)


def _argument(key: Key, config: RunConfig) -> str:
    value: Any = config
    for part in key.path.split("."):
        value = getattr(value, part)
    text = value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False)
    return f"--{key.path}=none" if value is None else f"--{key.path}={text}"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(_CONFIGS, _CONFIGS)
def test_every_key_can_be_given_on_the_command_line(first: RunConfig, second: RunConfig) -> None:
    arguments = [_argument(key, second) for key in keys().values()]
    assert _reread(first, *arguments) == second


@settings(max_examples=30, deadline=None)
@given(_CONFIGS)
def test_the_file_holds_every_key(config: RunConfig) -> None:
    plain = json.loads(json.dumps(dataclasses.asdict(config)))  # lists for tuples
    written = tomllib.loads(to_toml(config))
    for path in keys():
        value: Any = plain
        in_file: Any = written
        for part in path.split("."):
            value, in_file = value[part], in_file[part]
        assert in_file == ("none" if value is None else value)
