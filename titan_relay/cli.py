"""The command line: arguments become a validated configuration, and that becomes a run.

Every rank validates before anything heavy is imported or any process group starts; a mistake of the
user's is one line on rank 0 and exit code 2 on all.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence

from titan_relay.config import ConfigError, Loaded, help_text, load_config, to_toml
from titan_relay.validate import validate

EXIT_USER_ERROR = 2
_SECONDS_FOR_RANK_0 = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "--help" in arguments or "-h" in arguments:
        _say(rank, help_text())
        return 0
    try:
        loaded = load_config(arguments)
        if loaded.print_config:
            _say(rank, to_toml(loaded.config))
            return 0
        validate(loaded.config, world_size, loaded.sources, files=not loaded.plan)
        return _plan(loaded, rank, world_size) if loaded.plan else _train(loaded, world_size)
    except ConfigError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            # torchrun stops all ranks when the first one ends; let rank 0 speak before that.
            time.sleep(_SECONDS_FOR_RANK_0)
        return EXIT_USER_ERROR


def _say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, end="" if text.endswith("\n") else "\n")


def _train(loaded: Loaded, world_size: int) -> int:
    """Hand over to torchtitan, which takes seconds to import."""
    _single_process_environment()
    from titan_relay.titan.run import run

    return run(loaded.config, world_size, loaded.sources)


def _plan(loaded: Loaded, rank: int, world_size: int) -> int:
    """Rank 0 plans; the run that is planned needs no data here."""
    if rank != 0:
        return 0
    from titan_relay.titan.plan.watch import print_plan

    return print_plan(loaded.config, world_size)


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
