"""One run from its validated configuration to its end: build, train, close, whatever happens."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.tools.logging import init_logger, logger

from titan_relay.config import RunConfig, Sources
from titan_relay.data import DataError
from titan_relay.moe import RingError
from titan_relay.titan.balance_hook import NonFiniteRouterError
from titan_relay.titan.build import build_trainer_config
from titan_relay.titan.check_device import check_device
from titan_relay.titan.metrics_folder import FolderError
from titan_relay.titan.summary import log_summary
from titan_relay.titan.trainer import RelayTrainer


def run(config: RunConfig, world_size: int, sources: Sources) -> int:
    """Train; returns the process's exit code.

    Raises:
        ConfigError: before the process group starts.
    """
    rank = int(os.environ["RANK"])
    _init_logging(rank)
    _set_threads(config)
    # torchtitan tells the user of pipeline parallelism to set this, or the loss would not be seen;
    # here the rank that has the loss always speaks.
    os.environ.setdefault("LOG_RANK", ",".join(str(each) for each in range(world_size)))
    check_device(config, sources)
    trainer_config = build_trainer_config(config, world_size)
    done = finished_step(config)
    if done is not None:
        logger.info(
            f"Nothing to train: {config.dump_folder} holds the checkpoint of step {done}, and "
            f"training.steps is {config.training.steps}. Raise training.steps to go on."
        )
        return 0
    log_summary(config, world_size)
    return _train(trainer_config, rank)


def _train(trainer_config: RelayTrainer.Config, rank: int) -> int:
    trainer = None
    try:
        trainer = trainer_config.build()
        if trainer.metrics_processor.is_metrics_rank:
            logger.setLevel(logging.INFO)  # under pipeline parallelism rank 0 has no loss to report
        trainer.train()
        return 0
    except (FolderError, NonFiniteRouterError) as error:  # the same on every rank
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 1
    except (DataError, RingError) as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr)
        return 1
    finally:
        if trainer is not None:
            trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def finished_step(config: RunConfig) -> int | None:
    """The step of the last complete checkpoint if it is the run's last step or later."""
    if not config.checkpoint.enable or config.checkpoint.load_step != -1:
        return None
    folder = Path(config.dump_folder) / config.checkpoint.folder
    steps = [
        int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/.metadata")
    ]
    newest = max(steps, default=0)
    return newest if newest >= config.training.steps else None


def _init_logging(rank: int) -> None:
    """Let rank 0 tell the story; the others speak of errors and of their own data only."""
    init_logger()
    if rank != 0:
        logger.setLevel(logging.ERROR)
        logging.getLogger("titan_relay").setLevel(logging.WARNING)


def _set_threads(config: RunConfig) -> None:
    """Share the machine's cores among its ranks unless told how many threads each gets."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_threads = config.training.cpu_threads_per_rank
    torch.set_num_threads(num_threads or max(1, (os.cpu_count() or 1) // local_ranks))
