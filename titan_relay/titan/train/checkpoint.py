"""torchtitan's checkpoints, found and deleted by one rule, with a last one that is a whole Hugging
Face folder.

torchtitan takes every folder whose name holds a step's number for a checkpoint, and the highest for
the newest: `checkpoint_folder` says what is one here. It also writes where it will be found, loads
without looking whether it is what was written, and lets the process end while a thread still saves:
`checkpoint_writer` writes, the newest sound one is loaded, and threads are waited for.

torchtitan writes the weights of a checkpoint for Hugging Face alone, into one file. Here they are
cut into files of a few gigabytes, which ranks write side by side, and `config.json` and the
tokenizer are there too.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from titan_relay.config import RunConfig, to_toml
from titan_relay.config.errors import toml_value
from titan_relay.private_torch import set_group_timeout
from titan_relay.titan.hf.completion import (
    file_mark,
    files_of,
    first_damage,
    read_mark,
    share_of,
    write_mark,
)
from titan_relay.titan.hf.errors import HfError
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
from titan_relay.titan.hf.safe_pickle import SafeLoadPlanner, SafeReader
from titan_relay.titan.model.experts import local_part
from titan_relay.titan.model.finite import refuse_nonfinite
from titan_relay.titan.train.checkpoint_folder import (
    CheckpointFolder,
    damage_of,
    none_is_sound,
    retire,
)
from titan_relay.titan.train.checkpoint_writer import MarkingWriter, SaveError, reason_of
from titan_relay.units import in_words

T = TypeVar("T")


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
        self._future_step = -1  # of `save_future`
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
        """Load the newest sound checkpoint, or the step that was asked for.

        Raises:
            HfError: there are checkpoints and none of them is sound, or the one asked for is not.
        """
        self._loaded_step = self._step_to_load(step)
        initial = self._run.checkpoint.initial_load_path
        is_ours = initial is not None and not self.initial_load_in_hf and "://" not in initial
        if self._loaded_step == -1 and is_ours and (damage := self._damage(Path(str(initial)))):
            raise HfError(damage)
        loaded = super()._load(self._loaded_step)
        self._start_step = self.states["train_state"].step
        return loaded

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        due: bool = super()._should_save(curr_step, last_step)
        return due or (self.save_next and not self.load_only)

    def _step_to_load(self, load_step: int) -> int:
        """What rank 0 finds: a file system may show ranks different folders."""
        wanted = self._folder.step_to_load(load_step, to_toml(self._run))
        found: list[Any] = [wanted, list(self._folder.steps())]
        dist.broadcast_object_list(found, src=0)
        wanted, steps = found
        if load_step == wanted != -1:
            if damage := self._damage(self._folder.of_step(wanted)):
                raise HfError(damage)
            return load_step
        if load_step != -1:
            logger.warning(
                f"This configuration went back to step {load_step} before, so it goes on from step "
                f"{wanted}, the newest since. To go back to step {load_step} once more, "
                f"delete {self._folder.request}"
            )
        for step in reversed(steps):
            damage = self._damage(self._folder.of_step(step))
            if damage is None:
                return int(step)
            if dist.get_rank() == 0:
                logger.warning(f"{damage}; it is skipped, for the newest before it")
        if steps:
            raise HfError(none_is_sound(self._folder))
        return -1

    def _damage(self, checkpoint: Path) -> str | None:
        """Why a checkpoint is not to be loaded, or None, the same on every rank; each rank reads a
        share of the files."""
        start = time.monotonic()
        found: list[Any] = [None, None]
        if dist.get_rank() == 0:
            damage = damage_of(checkpoint)
            found = [damage, None if damage else read_mark(checkpoint)]
        dist.broadcast_object_list(found, src=0)
        damage, files = found
        if damage is not None:
            return str(damage)
        if files is None:
            logger.info(f"{checkpoint} was written without checksums: only its sizes were compared")
            return None
        share = share_of(files, dist.get_rank(), dist.get_world_size())
        by_rank = all_ranks(first_damage(checkpoint, files, share))
        size = in_words(sum(each.size_bytes for each in files.values()))
        logger.info(f"Compared {size} with their checksums in {time.monotonic() - start:.2f} s")
        return next((each for each in by_rank if each is not None), None)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load, and run nothing that the files say; see `CheckpointManager.dcp_load`.

        Raises:
            HfError: one line with what went wrong.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        try:
            reader, planner = SafeReader(checkpoint_id), SafeLoadPlanner()
            dcp.load(state_dict, storage_reader=reader, planner=planner)
        except CheckpointException as error:
            reason_of(error)  # an interrupted rank is none that fails
            first = str(next(iter(error.failures.values()))[0]).split("\n", 1)[0]
            raise HfError(f"{checkpoint_id} cannot be loaded: {first}") from error
        self.states[MODEL].load_state_dict(state_dict)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._saved_step = curr_step
        try:
            return super()._save(curr_step, last_step)
        except (CheckpointException, OSError) as error:
            self._fail(curr_step, error, is_last=last_step)
            return False

    def _wait_for_saving(self) -> None:
        assert self.save_future is not None
        future, self.save_future = self.save_future, None
        try:
            future.result()
        except (CheckpointException, OSError) as error:
            self._fail(self._future_step, error, is_last=False)

    def _fail(self, step: int, error: BaseException, *, is_last: bool) -> None:
        """After a save that failed, on every rank: leave nothing of it, and stop or go on.

        Raises:
            SaveError: `checkpoint.on_save_error` says so, or nothing is left to train.
        """
        reason = reason_of(error)
        if reason is None:
            raise error
        message = f"step {step} could not be saved: {reason}; earlier checkpoints are untouched"
        is_first = dist.get_rank() == 0
        if is_first:
            shutil.rmtree(self._folder.saving(step), ignore_errors=True)  # or at the next start
        if is_last or self._run.checkpoint.on_save_error == "stop":
            raise SaveError(message) from error
        if is_first:
            logger.error(f"{message}. Training goes on (checkpoint.on_save_error)")

    def _begin_line(self) -> None:
        """Before the first checkpoint of this run, on all ranks: nobody writes until it is done."""
        if self._line_is_begun:
            return
        self._line_is_begun = True
        if dist.get_rank() == 0:
            step, load_step = self._start_step, self._run.checkpoint.load_step
            for path in self._folder.begin_line(step, load_step, to_toml(self._run)):
                logger.info(f"Going back to step {step}: what came later is {path} now")
            for path in self._folder.leftovers():
                logger.info(f"Removing {path}, which a run that was killed left behind")
                shutil.rmtree(path)
        dist.barrier()

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Write a checkpoint, or begin to; see `CheckpointManager.dcp_save`.

        Raises:
            NonFiniteStepError: on every rank, and nothing is written.
        """
        refuse_nonfinite(state_dict, checkpoint_id)
        self._begin_line()
        if to_hf:  # into `_save_last_step`'s folder, which it gives its name
            path = str(self._folder.saving(self._saved_step))
            return super().dcp_save(state_dict, path, async_mode, enable_garbage_collection, True)
        writer = MarkingWriter(self._folder, self._saved_step)
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
            if enable_garbage_collection:
                GarbageCollection.collect("GC collection invoked by checkpointer.")
            return None
        self._future_step = self._saved_step
        other_process: dict[str, Any] = {
            "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
            "async_stager": self.stager,
        }
        return dcp.async_save(
            state_dict,
            storage_writer=writer,
            process_group=self.pg,
            **(other_process if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM else {}),
        )

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k == 0 or dist.get_rank() != 0:
            return
        stale = self._folder.stale(
            self.keep_latest_k, saved=self._saved_step, loaded=self._loaded_step
        )
        for path in stale:
            try:
                self.purge_queue.put(str(retire(path)))
            except OSError as error:
                logger.warning(f"{path} cannot be deleted: {error.strerror}")

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
        folder = self._folder.saving(curr_step)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            assets = export_assets(self._run)
            config = exported_config(self._run.model, assets, self.export_dtype)
            files = files_to_copy(assets, tokenizer_of(self._run.tokenizer))
            write_assets(folder, config, files)
        super()._save_last_step(curr_step)
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "sharded")  # what the files were put together from
        dist.barrier()
        names = [str(path.relative_to(folder)) for path in files_of(folder)]
        share = names[dist.get_rank() :: dist.get_world_size()]
        by_rank = all_ranks({name: file_mark(folder / name) for name in share})
        if dist.get_rank() == 0:
            files_marked = {name: mark for each in by_rank for name, mark in each.items()}
            write_mark(folder, curr_step, files_marked)
            self._folder.publish(curr_step)
        dist.barrier()

    def _close(self) -> None:
        """End, after a save that a thread has begun; not for ever, as a rank of it may be gone."""
        if self.save_future is not None:
            timeout_s = self._run.comm.train_timeout_seconds
            done, _ = wait([self.save_future], timeout_s)
            failure = self.save_future.exception() if done else f"no end within {timeout_s} s"
            if failure is not None:
                reason = reason_of(failure) if isinstance(failure, BaseException) else failure
                logger.error(f"step {self._future_step} could not be saved: {reason or failure}")
                if done and dist.get_rank() == 0:
                    shutil.rmtree(self._folder.saving(self._future_step), ignore_errors=True)
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
        worst = max((each for each in all_ranks(own) if each is not None), default=None)
        return None if worst is None else out_of_range(worst[1], worst[0], self.export_dtype)


def all_ranks(value: T) -> list[T]:
    """Every rank's value, by rank."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, value)
    return by_rank


def export_assets(run: RunConfig) -> Path | None:
    """The Hugging Face folder that the run started from, whose other files an export copies."""
    path = run.checkpoint.initial_load_path
    return Path(path) if run.checkpoint.initial_load_in_hf and path is not None else None
