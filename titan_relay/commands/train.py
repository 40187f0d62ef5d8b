"""`titan-relay train`, which is also `train.py`: a run, its final configuration, or its plan.

Every rank validates before anything heavy is imported or any process group starts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from titan_relay.config import load_config, to_toml
from titan_relay.config.reference import help_text
from titan_relay.validate import validate


def main(arguments: Sequence[str]) -> int:
    """Train, or answer what is asked for instead; returns the process's exit code."""
    rank, world_size = 0, 1  # without a launcher, whatever a batch system has set
    if "RANK" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    if "--help" in arguments or "-h" in arguments:
        _say(rank, help_text())
        return 0
    loaded = load_config(arguments)
    if loaded.print_config:
        _say(rank, to_toml(loaded.config))
        return 0
    validate(loaded.config, world_size, loaded.origins, files=not loaded.plan)
    if loaded.plan:  # rank 0 plans; the run that is planned needs no data here
        if rank != 0:
            return 0
        from titan_relay.titan.plan.watch import print_plan

        return print_plan(loaded.config, world_size)
    _single_process_environment()
    from titan_relay.titan.run import run  # torchtitan takes seconds to import

    return run(loaded.config, world_size, loaded.origins)


def _say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, end="" if text.endswith("\n") else "\n")


def _single_process_environment() -> None:
    """Let plain `python train.py` stand in for torchrun with one process."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
