"""Tiny Hugging Face folders as `transformers` writes them, and the runs of their models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.titan.hf.cases import CASES, Case
from tests.titan.hf.reference import random_model
from titan_relay.config import RunConfig, load_config
from titan_relay.config.schema import ModelConfig
from titan_relay.titan.hf.config_json import config_of, toml_of
from titan_relay.titan.hf.export import shard_files, write_assets, write_index
from titan_relay.titan.hf.folder import read_config
from titan_relay.titan.hf.names import NameMap
from titan_relay.titan.hf.safetensors_file import FileLayout

QWEN3, QWEN3_TIED = CASES[0], CASES[1]
assert (QWEN3.family, QWEN3_TIED.hf["tie_word_embeddings"]) == ("qwen3_moe", True)


def write_folder(
    path: Path, case: Case = QWEN3, *, shard: str = "60KB", dtype: str = "float32", **hf: Any
) -> Any:
    """Write a random model; returns it. `hf` changes arguments of its configuration."""
    torch.manual_seed(0)
    model = random_model(replace(case, hf=case.hf | hf)).to(getattr(torch, dtype)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path, max_shard_size=shard)
    return model


def run_of(folder: Path, *settings: str) -> RunConfig:
    """The configuration whose [model] is that of the folder's `config.json`."""
    file = folder.with_name(folder.name + ".toml")
    file.write_text(toml_of(read_config(folder)), encoding="utf-8")
    return load_config(["--config", str(file), *settings]).config


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir()) if each.is_file()}


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Put a folder's weights into one file after `change` has changed them."""
    from safetensors.torch import load_file, save_file

    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_noise(folder: Path, model: ModelConfig, *, shard_bytes: int) -> int:
    """Write weights of any size in bfloat16, tensor by tensor; returns their bytes."""
    shapes = NameMap(model).hf_shapes
    sizes = {name: torch.Size(shape).numel() * 2 for name, shape in shapes.items()}
    file_of = shard_files(sizes, shard_bytes)
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**15), 2**15, (2**20,), generator=generator, dtype=torch.int16)
    for file in sorted(set(file_of.values())):
        layout = FileLayout((n, torch.bfloat16, shapes[n]) for n in shapes if file_of[n] == file)
        layout.create(folder / file)
        for index, name in enumerate(layout.places):
            count = torch.Size(shapes[name]).numel()
            # Each tensor its own bytes: the noise, shifted by a number of its own.
            shift = (sum(name.encode()) * 31 + index) % 2**15
            values = (noise + shift).repeat(-(-count // len(noise)))[:count]
            layout.write(folder / file, name, values.view(torch.bfloat16).view(shapes[name]))
    write_index(folder, file_of, sum(sizes.values()))
    write_assets(folder, config_of(model, "bfloat16"), [])
    return sum(sizes.values())
