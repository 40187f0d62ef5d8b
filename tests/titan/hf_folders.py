"""Tiny Hugging Face folders as `transformers` writes them, and the runs of their models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from titan_relay.config import RunConfig, load_config
from titan_relay.titan.hf.config_json import toml_of
from titan_relay.titan.hf.folder import read_config

# Arguments of the `transformers` configuration; odd sizes, so that swapped ones do not fit.
KWARGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "vocab_size": 67,
        "hidden_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "intermediate_size": 50,
        "moe_intermediate_size": 14,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "tie_word_embeddings": False,
    },
}
FAMILIES = tuple(KWARGS)


def write_folder(
    path: Path,
    family: str = "qwen3_moe",
    *,
    shard: str = "12KB",
    dtype: str = "float32",
    **kwargs: Any,
) -> Any:
    """Write a random model of a family; returns the `transformers` model."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(len(family))
    config = CONFIG_MAPPING[family](**KWARGS[family] | kwargs)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or "bias" in name:  # else all ones and zeros, which hides a mistake
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model = model.to(getattr(torch, dtype)).eval()
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
