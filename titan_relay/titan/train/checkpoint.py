"""torchtitan's checkpoints, found and deleted by one rule, with a last one that is a whole Hugging
Face folder.

torchtitan takes every folder whose name holds a step's number for a checkpoint, and the highest for
the newest: `checkpoint_folder` says what is one here. It also lets the process end while a thread
still saves; here that is waited for.

torchtitan writes the weights of a checkpoint for Hugging Face alone, into one file. Here they are
cut into files of a few gigabytes, which ranks write side by side, and `config.json` and the
tokenizer are there too.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.tools.logging import logger

from titan_relay.config import RunConfig, to_toml
from titan_relay.config.errors import toml_value
from titan_relay.private_torch import set_group_timeout
from titan_relay.titan.hf.export import (
    SHARD_BYTES,
    exported_config,
    files_to_copy,
    shard_numbers,
    tokenizer_of,
    write_assets,
)
from titan_relay.titan.hf.names import NameMap
from titan_relay.titan.hf.number_range import RangeError, out_of_range, overflow
from titan_relay.titan.model.experts import local_part
from titan_relay.titan.model.finite import refuse_nonfinite
from titan_relay.titan.train.checkpoint_folder import CheckpointFolder, unmark


class RelayCheckpointManager(CheckpointManager):
    """Saves and loads; see `torchtitan.components.checkpointer.CheckpointManager`.

    Attributes:
        save_next: whether the step is saved that is offered next, as one at the interval is.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        run: RunConfig

    save_future: Future[Any] | None

    last_save_model_only: bool

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._run = config.run
        self.save_next = False
        self._loaded_step, self._saved_step, self._start_step = -1, -1, 0
        self._line_is_begun = False
        if self.enable:
            self._folder = CheckpointFolder(Path(self.folder))
            if self.pg is not None:
                # It is made with torch's half an hour, for which a save in a thread, and the end
                # of the process after it, would wait for a rank that has stalled.
                seconds = config.run.comm.train_timeout_seconds
                set_group_timeout(timedelta(seconds=seconds), self.pg)

    def _find_load_step(self, folder: str = "") -> int:
        return max(CheckpointFolder(Path(folder or self.folder)).complete(), default=-1)

    def _load(self, step: int = -1) -> bool:
        """Load the step that rank 0 finds: a file system may show ranks different folders."""
        found = [self._folder.step_to_load(step, to_toml(self._run))]
        dist.broadcast_object_list(found, src=0)
        self._loaded_step = found[0]
        if step not in (-1, self._loaded_step):
            logger.warning(
                f"This configuration went back to step {step} before, so it goes on from step "
                f"{self._loaded_step}, the newest since. To go back to step {step} once more, "
                f"delete {self._folder.request}"
            )
        loaded = super()._load(self._loaded_step)
        self._start_step = self.states["train_state"].step
        return loaded

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        due: bool = super()._should_save(curr_step, last_step)
        return due or (self.save_next and not self.load_only)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._saved_step = curr_step
        return super()._save(curr_step, last_step)

    def _begin_line(self) -> None:
        """Before the first checkpoint of this run, on all ranks: nobody writes until it is done."""
        if self._line_is_begun:
            return
        self._line_is_begun = True
        if dist.get_rank() == 0:
            step, load_step = self._start_step, self._run.checkpoint.load_step
            for path in self._folder.begin_line(step, load_step, to_toml(self._run)):
                logger.info(f"Going back to step {step}: what came later is {path} now")
        dist.barrier()

    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kw: Any
    ) -> Any:
        """Write a checkpoint, or begin to; see `CheckpointManager.dcp_save`.

        Raises:
            NonFiniteStepError: on every rank, and nothing is written.
        """
        refuse_nonfinite(state_dict, checkpoint_id)
        self._begin_line()
        return super().dcp_save(state_dict, checkpoint_id, *args, **kw)

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k == 0 or dist.get_rank() != 0:
            return
        stale = self._folder.stale(
            self.keep_latest_k, saved=self._saved_step, loaded=self._loaded_step
        )
        for path in stale:
            try:
                unmark(path)
            except OSError as error:
                logger.warning(f"{path} cannot be deleted: {error.strerror}")
            else:
                self.purge_queue.put(str(path))

    def _save_last_step(self, curr_step: int) -> None:
        if self.last_save_model_only and (beyond := self._out_of_range()):
            # Nothing is lost: this can be exported later in a wider type, or trained on.
            self.last_save_model_only = self.last_save_in_hf = False
            self._save_last_step(curr_step)
            raise RangeError(
                f"checkpoint.export_dtype = {toml_value(self._run.checkpoint.export_dtype)}: "
                f"{beyond}; {self._folder.of_step(curr_step)} holds the weights in their own type "
                "and all that training needs: export it by `titan-relay convert to-hf` with a "
                "wider --dtype"
            )
        if not self.last_save_in_hf:
            super()._save_last_step(curr_step)
            if not self.last_save_model_only:  # one that nobody can go on from replaces none
                self._purge_stale_checkpoints()
            return
        refuse_nonfinite(self.states[MODEL].state_dict(), self._folder.of_step(curr_step))
        self._begin_line()
        assert self.sd_adapter is not None
        itemsize = self.export_dtype.itemsize
        sizes = {
            name: torch.Size(shape).numel() * itemsize
            for name, shape in NameMap(self._run.model).hf_shapes.items()
        }
        self.sd_adapter.fqn_to_index_mapping = shard_numbers(sizes, SHARD_BYTES)
        folder = self._folder.of_step(curr_step)
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

    def _close(self) -> None:
        """End, after a save that a thread has begun; not for ever, as a rank of it may be gone."""
        if self.save_future is not None:
            timeout_s = self._run.comm.train_timeout_seconds
            done, _ = wait([self.save_future], timeout_s)
            failure = self.save_future.exception() if done else f"no end within {timeout_s} s"
            if failure is not None:
                logger.error(f"{self._folder.of_step(self._saved_step)} is not whole: {failure}")
            self.save_future = None
        super()._close()

    def _out_of_range(self) -> str | None:
        """What `export_dtype` cannot hold, in words, the same on every rank."""
        weights = [
            (name, local_part(value))
            for name, value in self.states[MODEL].state_dict().items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]
        found = ((overflow(value, self.export_dtype), name) for name, value in weights)
        own = max(((beyond, name) for beyond, name in found if beyond is not None), default=None)
        by_rank: list[tuple[float, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, own)
        worst = max((each for each in by_rank if each is not None), default=None)
        return None if worst is None else out_of_range(worst[1], worst[0], self.export_dtype)


def export_assets(run: RunConfig) -> Path | None:
    """The Hugging Face folder that the run started from, whose other files an export copies."""
    path = run.checkpoint.initial_load_path
    return Path(path) if run.checkpoint.initial_load_in_hf and path is not None else None
