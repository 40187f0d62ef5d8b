"""`[model]` from a `config.json`, a `config.json` from `[model]`, and whether two of them agree."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from titan_relay.config.errors import Place, toml_value
from titan_relay.config.fields import REQUIRED as NO_DEFAULT
from titan_relay.config.reader import read_value
from titan_relay.config.schema import ModelConfig, keys
from titan_relay.config.toml import dump_tables
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.model.families import FAMILIES
from titan_relay.titan.model.families.architecture import REQUIRED, Architecture, HfKey

# Number of layers behind the model's own that only predict further tokens, as files call it.
MTP_NAMES = ("num_nextn_predict_layers", "num_mtp_layers")


def architecture_of(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """The family and the architecture of a `config.json`, by its `model_type`.

    Raises:
        HfError: no family of this project is of that type.
    """
    there = [(name, each) for name, family in FAMILIES.items() for each in family.architectures]
    for name, each in there:
        if each.model_type == config.get("model_type"):
            return name, each
    known = ", ".join(each.model_type for _, each in there)
    raise HfError(
        f"config.json: model_type = {config.get('model_type')!r}: no family for it; there are "
        f"families for {known}"
    )


def normalised(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with the rotary embedding's keys at the top level, wherever the file has them.

    Files of transformers 5 have them in `rope_parameters`, older ones `rope_theta` at the top and
    the rest, where it is not the default, in `rope_scaling`.
    """
    flat = dict(config)
    flat.setdefault("rope_type", "default")
    for name in ("rope_scaling", "rope_parameters"):
        inner = flat.pop(name, None) or {}
        if "type" in inner:
            inner = {"rope_type": inner["type"], **inner}
        flat.update(inner)
    return flat


def model_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `[model]` by key, such as "moe.top_k", from a `config.json`.

    Raises:
        HfError: an unknown architecture, a key that is missing, or a value that the family lacks.
    """
    family, architecture = architecture_of(config)
    flat = _completed(normalised(config), architecture)
    for name, allowed in architecture.only.items():
        if name in flat and flat[name] not in allowed:
            raise HfError(
                f"config.json: {name} = {flat[name]!r}: family {family} computes only "
                f"{' or '.join(repr(each) for each in allowed)}"
            )
    _refuse_window(flat, family, architecture)
    if flat.get("partial_rotary_factor") not in (None, 1):
        raise HfError(
            f"config.json: partial_rotary_factor = {flat['partial_rotary_factor']}: every family "
            "rotates whole heads"
        )
    values = {"family": family, **architecture.fixed}
    for key in architecture.keys:
        values[key.toml] = _read(key, flat)
    return values


def _refuse_window(config: Mapping[str, Any], family: str, architecture: Architecture) -> None:
    """Attention here sees the whole sequence; a window as long as the longest one is none."""
    if "use_sliding_window" in architecture.only:
        return  # the class reads the window only if that is true, which is refused
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings", 0)
    if isinstance(window, int) and isinstance(longest, int) and window < longest:
        raise HfError(
            f"config.json: sliding_window = {window} is shorter than max_position_embeddings = "
            f"{longest}: family {family} has no such window"
        )


def _read(key: HfKey, config: Mapping[str, Any]) -> Any:
    """The value of a key of `[model]`; a number of the kind and within the limits of that key."""
    name = next((each for each in key.names if config.get(each) is not None), None)
    try:
        if name is None:
            value = key.default(config) if callable(key.default) else key.default
        else:
            value = config[name] if key.read is None else key.read(config[name], config)
    except (TypeError, ValueError) as error:
        raise HfError(f"config.json: {name or key.names[0]}: {error}") from error
    ours = keys()[f"model.{key.toml}"]
    if name is None or ours.type not in (bool, int, float):
        return value
    return read_value(ours, value, Place("config.json", name))


def _completed(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Fill in what a file leaves out because it is the default of its class in transformers."""
    lacking = [
        key.names[0]
        for key in architecture.keys
        if key.default is REQUIRED and all(config.get(name) is None for name in key.names)
    ]
    if not lacking:
        return config
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise HfError(
            f"config.json has no {', '.join(lacking)}; only transformers knows the defaults: "
            "pip install transformers"
        ) from error
    try:
        full = CONFIG_MAPPING[architecture.model_type].from_dict(dict(config)).to_dict()
    except Exception as error:  # each class has its own for a value that it does not take
        reason = " ".join(str(error).split())
        raise HfError(f"config.json: transformers does not take it: {reason}") from error
    return {**normalised(full), **config}


def config_of(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """A `config.json` for `[model]`; `dtype` is that of the weights, such as "bfloat16".

    Raises:
        HfError: Hugging Face's class cannot compute this model.
    """
    architecture = FAMILIES[model.family].architectures[0]
    for toml, value in architecture.fixed.items():
        if (own := attrgetter(toml)(model)) != value:
            raise HfError(
                f"model.{toml} = {toml_value(own)}: "
                f"{architecture.class_name} has only {toml_value(value)}"
            )
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,  # the same key as older readers call it
    }
    config |= {name: allowed[0] for name, allowed in architecture.only.items()}
    for key in architecture.keys:
        if not key.in_rope:
            value = attrgetter(key.toml)(model) if key.write is None else key.write(model)
            config |= dict.fromkeys(key.names, value)
    config.pop("rope_type")
    config["rope_parameters"] = architecture.rope(model)
    return config | (architecture.extra(model) if architecture.extra is not None else {})


def first_difference(
    model: ModelConfig, config: Mapping[str, Any], file: Path = Path("config.json")
) -> str | None:
    """The first key in which the two are different models, in words; None if they are the same.

    Raises:
        HfError: as `model_of`.
    """
    _, architecture = architecture_of(config)
    theirs = model_of(config)
    names = {key.toml: key.names[0] for key in architecture.keys if not key.choice}
    for toml in ("family", *names, *architecture.fixed):
        value = attrgetter(toml)(model)
        if value != theirs[toml]:
            return (
                f"model.{toml} = {toml_value(value)}: {file} has "
                f"{names.get(toml, 'model_type')} = {toml_value(theirs[toml])}"
            )
    return None


def mtp_layers(config: Mapping[str, Any]) -> range:
    """Layers of a folder's weights that only predict further tokens; they are not trained here."""
    counts = [config[name] for name in MTP_NAMES if config.get(name)]
    first = config.get("num_hidden_layers", 0)
    return range(first, first + (counts[0] if counts else 0))


def toml_of(config: Mapping[str, Any]) -> str:
    """The `[model]` sections of a `config.json`, as text; keys at their default are left out."""
    values = model_of(config)
    tables: dict[str, Any] = {}
    for path, key in keys().items():
        if not path.startswith("model."):
            continue
        toml = path.removeprefix("model.")
        if toml not in values or (key.default is not NO_DEFAULT and values[toml] == key.default):
            continue
        table = tables
        for name in key.section.split("."):
            table = table.setdefault(name, {})
        table[key.name] = values[toml]
    return dump_tables(tables)
