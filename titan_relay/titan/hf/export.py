"""What an exported folder has besides weights, and how its weights are cut into files.

Used by the conversion of a checkpoint and by a run that writes its last checkpoint this way.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.logging import logger

from titan_relay.config.schema import ModelConfig, TokenizerConfig
from titan_relay.titan.hf.config_json import MTP_NAMES, config_of, first_difference, mtp_layers
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.hf.folder import (
    CONFIG,
    INDEX,
    SINGLE,
    TOKENIZER_CONFIG,
    other_files,
    read_config,
    read_json,
    tokenizer_files,
)

SHARD_BYTES = 5 * 10**9  # as transformers cuts


def shard_numbers(sizes_bytes: dict[str, int], shard_bytes: int) -> dict[str, int]:
    """The number, from 1, of each tensor's file: in order, no file larger than `shard_bytes`
    unless one tensor is."""
    shard, size_bytes = 1, 0
    numbers: dict[str, int] = {}
    for name, num_bytes in sizes_bytes.items():
        if size_bytes and size_bytes + num_bytes > shard_bytes:
            shard, size_bytes = shard + 1, 0
        numbers[name] = shard
        size_bytes += num_bytes
    return numbers


def shard_files(sizes_bytes: dict[str, int], shard_bytes: int) -> dict[str, str]:
    """The name of each tensor's file."""
    numbers = shard_numbers(sizes_bytes, shard_bytes)
    last = max(numbers.values())
    if last == 1:
        return dict.fromkeys(numbers, SINGLE)
    return {name: f"model-{n:05}-of-{last:05}.safetensors" for name, n in numbers.items()}


def write_index(out: Path, file_of: dict[str, str], total_bytes: int) -> None:
    """Say which file each tensor is in; a single file goes without."""
    if set(file_of.values()) == {SINGLE}:
        return
    content = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    (out / INDEX).write_text(text, encoding="utf-8")


def tokenizer_of(settings: TokenizerConfig) -> list[Path]:
    """The files of a run's tokenizer."""
    path = Path(settings.path)
    if path.is_dir():
        return tokenizer_files(path)
    return [path] if path.is_file() else []


def exported_config(model: ModelConfig, assets: Path | None, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` to write: that of `assets` where it has one, else made from `[model]`.

    Raises:
        HfError: the one of `assets` is of another model, or Hugging Face cannot compute this one.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    if assets is None or not (assets / CONFIG).is_file():
        return config_of(model, dtype_name)
    config = read_config(assets)
    if difference := first_difference(model, config, assets / CONFIG):
        raise HfError(difference)
    if config.pop("auto_map", None):
        logger.info(
            f"auto_map of {assets / CONFIG} is left out: transformers knows the class itself"
        )
    for name in ("dtype", "torch_dtype"):
        if name in config:
            config[name] = dtype_name
    if _has_layers(assets, mtp_layers(config)):
        # The source has weights for these layers; they were left out, and are not exported.
        config |= {name: 0 for name in MTP_NAMES if name in config}
    return config


def _has_layers(folder: Path, layers: range) -> bool:
    index = folder / INDEX
    names = read_json(index).get("weight_map", {}) if index.is_file() else {}
    return any(name.startswith(f"model.layers.{layer}.") for name in names for layer in layers)


def files_to_copy(assets: Path | None, tokenizer: list[Path]) -> list[Path]:
    """What an export copies: the files of `assets`, but the tokenizer that was trained with."""
    if assets is None:
        return tokenizer
    return [*other_files(assets), *(tokenizer or tokenizer_files(assets))]


def write_assets(out: Path, config: dict[str, Any], files: list[Path]) -> None:
    """Copy `files`, and see that `config.json` is `config`."""
    for file in files:
        shutil.copyfile(file, out / file.name)
    unchanged = (out / CONFIG).is_file() and read_json(out / CONFIG) == config
    if not unchanged:
        _write_json(out / CONFIG, config)
    tokenizer = out / TOKENIZER_CONFIG
    if tokenizer.is_file() and (missing := _missing_code(out, content := read_json(tokenizer))):
        logger.info(f"auto_map of {TOKENIZER_CONFIG} is left out: {missing} is not there")
        del content["auto_map"]
        _write_json(tokenizer, content)


def _missing_code(folder: Path, config: dict[str, Any]) -> str | None:
    """A file of Python code that `config` names and the folder lacks; a hub's are not meant."""
    for each in (config.get("auto_map") or {}).values():
        for path in each if isinstance(each, list) else [each]:
            name = f"{str(path).partition('.')[0]}.py"
            if path and "--" not in path and not (folder / name).is_file():
                return name
    return None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
