"""torchtitan's checkpoints, with a last one that is a whole Hugging Face folder.

torchtitan writes the weights of such a checkpoint alone, into one file. Here they are cut into
files of a few gigabytes, which ranks write side by side, and `config.json` and the tokenizer are
there too.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager

from titan_relay.config import RunConfig
from titan_relay.titan.hf.export import (
    SHARD_BYTES,
    exported_config,
    files_to_copy,
    shard_numbers,
    tokenizer_of,
    write_assets,
)
from titan_relay.titan.hf.names import NameMap
from titan_relay.titan.private_torchtitan import checkpoint_folder


class RelayCheckpointManager(CheckpointManager):
    """Saves and loads; see `torchtitan.components.checkpointer.CheckpointManager`."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        run: RunConfig

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._run = config.run

    def _save_last_step(self, curr_step: int) -> None:
        if not self.last_save_in_hf:
            super()._save_last_step(curr_step)
            return
        assert self.sd_adapter is not None
        itemsize = self.export_dtype.itemsize
        sizes = {
            name: torch.Size(shape).numel() * itemsize
            for name, shape in NameMap(self._run.model).hf_shapes.items()
        }
        self.sd_adapter.fqn_to_index_mapping = shard_numbers(sizes, SHARD_BYTES)
        folder = Path(checkpoint_folder(self, curr_step))
        if dist.get_rank() == 0:
            # Before the weights: the folder counts as complete once their index is there.
            folder.mkdir(parents=True, exist_ok=True)
            assets = export_assets(self._run)
            config = exported_config(self._run.model, assets, self.export_dtype)
            files = files_to_copy(assets, tokenizer_of(self._run.tokenizer))
            write_assets(folder, config, files)
        super()._save_last_step(curr_step)
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "sharded")  # what the files were put together from


def export_assets(run: RunConfig) -> Path | None:
    """The Hugging Face folder that the run started from, whose other files an export copies."""
    path = run.checkpoint.initial_load_path
    return Path(path) if run.checkpoint.initial_load_in_hf and path is not None else None
