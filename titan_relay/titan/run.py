"""One run from its validated configuration to its end: build, train, close, whatever happens."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
import warnings
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.tools.logging import init_logger, logger

from titan_relay.config import ConfigError, Origins, RunConfig, to_toml
from titan_relay.config.check import remarks
from titan_relay.config.degrees import global_batch_size
from titan_relay.data import DataError
from titan_relay.launcher import say_error, tell_launcher, wait_for_others
from titan_relay.moe import RingError
from titan_relay.private_torch import end_process_groups
from titan_relay.titan.device import on_cpu
from titan_relay.titan.metrics.folder_lock import FolderError, FolderLock
from titan_relay.titan.model.finite import NonFiniteStepError
from titan_relay.titan.plan.watch import watch_plan
from titan_relay.titan.preflight.device import check_device
from titan_relay.titan.preflight.model_files import (
    check_export,
    check_initial_weights,
    check_tokenizer,
)
from titan_relay.titan.preflight.resume import check_checkpoint, check_dump_folder, find_checkpoint
from titan_relay.titan.preflight.shared_folder import check_shared_folder
from titan_relay.titan.preflight.summary import log_summary
from titan_relay.titan.train.build import build_trainer_config
from titan_relay.titan.train.checkpoint_writer import SaveError
from titan_relay.titan.train.early_end import EXIT_ENDED_EARLY, EarlyEnd, reasons
from titan_relay.titan.train.trainer import RelayTrainer

_LOCK_WAIT_S = 3.0  # ranks of a run whose launcher was killed end within two
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def run(config: RunConfig, world_size: int, origins: Origins) -> int:
    """Train; returns the process's exit code.

    Raises:
        ConfigError: before the process group starts.
    """
    # One rank's clock is enough, and cannot disagree with another's.
    early_end = EarlyEnd(config.training.max_minutes if os.environ["RANK"] == "0" else 0.0)
    with early_end.listening():
        return _run(config, world_size, origins, early_end)


def _run(config: RunConfig, world_size: int, origins: Origins, early_end: EarlyEnd) -> int:
    rank = int(os.environ["RANK"])
    _init_logging(rank)
    _set_threads(config)
    # torchtitan tells the user of pipeline parallelism to set this, or the loss would not be seen;
    # here the rank that has the loss always speaks.
    os.environ.setdefault("LOG_RANK", ",".join(str(each) for each in range(world_size)))
    check_device(config, origins, cpu=on_cpu())
    check_dump_folder(config, origins)
    check_tokenizer(config, origins)
    lock = _lock_checkpoints(config, rank)
    found = find_checkpoint(config, origins)
    if found is not None and found.step >= config.training.steps:
        logger.info(
            f"Nothing to train: {found.path} is of step {found.step}, and training.steps is "
            f"{config.training.steps}. Raise training.steps to go on."
        )
        return 0
    if found is not None:
        check_checkpoint(config, origins, found, global_batch_size(config, world_size))
    else:
        check_initial_weights(config, origins)
    check_export(config, origins)
    trainer_config = build_trainer_config(config, world_size)
    if config.debug.print_config:
        logger.info(f"Configuration:\n{to_toml(config)}")
    log_summary(config, world_size)
    for remark in remarks(config, origins):
        logger.info(remark)
    try:
        return _train(trainer_config, rank, origins, early_end)
    except _LostRank as error:  # said already
        end_process_groups()
        if not any(early_end.requests()):  # or torchrun has told this rank to end: there is a cause
            wait_for_others()
        tell_launcher(str(error))
        return 1
    finally:
        if lock is not None:
            lock.release()
        end_process_groups()


class _LostRank(Exception):
    """Another rank has died or stalled, which is no cause; the message is this rank's view."""


def _lock_checkpoints(config: RunConfig, rank: int) -> FolderLock | None:
    """Keep another run from writing the same checkpoints; rank 0 holds the lock for all."""
    if not config.checkpoint.enable or rank != 0:
        return None
    try:
        return FolderLock(Path(config.dump_folder) / config.checkpoint.folder, _LOCK_WAIT_S)
    except FolderError as error:
        raise ConfigError(str(error)) from error


def _train(
    trainer_config: RelayTrainer.Config, rank: int, origins: Origins, early_end: EarlyEnd
) -> int:
    trainer = None
    try:
        trainer = trainer_config.build()
        check_shared_folder(trainer_config.run, origins)
        if trainer.metrics_processor.is_metrics_rank:
            logger.setLevel(logging.INFO)  # under pipeline parallelism rank 0 has no loss to report
        trainer.early_end = early_end
        early_end.is_training = True
        _train_beside_plan(trainer)
        early_end.is_over = True
        return _end_early(trainer, rank) if trainer.ended_early else 0
    except (FolderError, NonFiniteStepError, SaveError) as error:  # the same on every rank
        say_error(str(error), alike=True)
        return 1
    except DataError as error:
        say_error(f"rank {rank}: {error}")
        return 1
    except RingError as error:
        message = f"rank {rank}: {error}"
        if (
            error.__cause__ is not None
        ):  # a transfer broke; otherwise ranks disagree, and all say so
            raise _lost(message) from error
        say_error(message)
        return 1
    except KeyboardInterrupt:
        if rank == 0:
            again = "; start again to go on from the last checkpoint"
            print(
                f"interrupted{again if trainer_config.checkpoint.enable else ''}", file=sys.stderr
            )
        return EXIT_INTERRUPTED
    except RuntimeError as error:
        operation = broken_operation(error)
        if operation is None:
            raise
        step = 0 if trainer is None else trainer.step
        raise _lost(broken_message(rank, step, operation, error)) from error
    finally:
        early_end.is_training = False
        if trainer is not None:
            trainer.close()


def _lost(message: str) -> _LostRank:
    """The exception for a rank that lost another, after printing what it knows."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    return _LostRank(message)


def _end_early(trainer: RelayTrainer, rank: int) -> int:
    """Say what is saved, and leave together: torchrun ends the others when the first one ends."""
    run = trainer.config.run
    if not run.checkpoint.enable or run.checkpoint.load_only:
        key = "load_only = true" if run.checkpoint.enable else "enable = false"
        saved = f"nothing is saved, as checkpoint.{key}"
    else:
        folder = Path(run.dump_folder) / run.checkpoint.folder / f"step-{trainer.step}"
        saved = f"{folder} is saved; start again to go on"
    message = f"ended after step {trainer.step} ({reasons(trainer.balance.asked)}): {saved}"
    if rank == 0:
        print(message, file=sys.stderr, flush=True)
    tell_launcher(message)
    dist.barrier()
    return EXIT_ENDED_EARLY


def _train_beside_plan(trainer: RelayTrainer) -> None:
    """Train; on the rank that reports with a plan made meanwhile, if the run asks for one."""
    metrics, run = trainer.metrics_processor, trainer.config.run
    if not (metrics.is_metrics_rank and run.metrics.plan):
        trainer.train()
        return
    with closing(watch_plan(run, metrics)) as watch, trainer.observed(watch):
        trainer.train()


def _init_logging(rank: int) -> None:
    """Let rank 0 tell the story; the others speak of errors and of their own data only."""
    init_logger()
    if rank != 0:
        logger.setLevel(logging.ERROR)
        logging.getLogger("titan_relay").setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_news)
    for message in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


# What torchtitan and torch say at every start and that no user can or need act on.
_NOISE = (
    "Peak FLOPS used for computing MFU: nan",
    "CPU memory usage for model",
    "[Override]",
    "Sleeping 2 seconds",
    "Destroying the purge thread",
    "[GC]",
)
_KNOWN_WARNINGS = (
    "DTensor manual_seed",  # weights come from titan_relay.titan.model.init
    ".*is not supported on .* device mesh",
    "Detected call of `lr_scheduler.step",  # torchtitan restores schedulers this way
    ".*all_gather_into_tensor.* is deprecated",
    ".*reduce_scatter_tensor.* is deprecated",
)


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NOISE)


def _set_threads(config: RunConfig) -> None:
    """Share the machine's cores among its ranks unless told how many threads each gets."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_threads = config.training.cpu_threads_per_rank
    if not num_threads and local_ranks == 1 and "OMP_NUM_THREADS" in os.environ:
        return  # the user has said; torchrun sets it to 1 by itself for several ranks
    torch.set_num_threads(num_threads or max(1, (os.cpu_count() or 1) // local_ranks))


# Files of torch whose functions are the operations that ranks do together.
_COLLECTIVE_FILES = ("distributed_c10d.py", "_functional_collectives.py")
_HELPERS = ("wrapper", "_exception_logger", "_time_logger", "inner")
_BACKEND_WORDS = re.compile(r"gloo|nccl|ProcessGroup|Connection (closed|reset)|Timed out", re.I)


def broken_operation(error: BaseException) -> str | None:
    """The operation between ranks that `error` interrupted; None if it was no such error."""
    if not _BACKEND_WORDS.search(str(error)):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    names = [
        frame.name
        for frame in frames
        if frame.filename.endswith(_COLLECTIVE_FILES) and frame.name not in _HELPERS
    ]
    return names[-1] if names else "an operation between ranks"


def broken_message(rank: int, step: int, operation: str, error: BaseException) -> str:
    """One line for the user of this rank."""
    reason = str(error).split("\n")[0].split(" This is typically")[0]
    return (
        f"rank {rank}: step {step}: {operation} did not finish: {reason}; another rank has died "
        "or stalled: see what it said, then start again to go on from the last checkpoint"
    )
