"""`titan-relay train`, which is also `train.py`: a run, its final configuration, or its plan.

Every rank validates before anything heavy is imported or any process group starts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from titan_relay.commands import arguments as arg
from titan_relay.config import ConfigError, load_config, to_toml
from titan_relay.config.errors import Place
from titan_relay.config.reference import help_text
from titan_relay.validate import validate

_COUNTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_LAUNCHED = "torchrun sets it; to train on one process, unset RANK"


def main(arguments: Sequence[str]) -> int:
    """Train, or answer what is asked for instead; returns the process's exit code."""
    rank, world_size = _place_among_ranks(os.environ)
    if "--help" in arguments or "-h" in arguments:
        _say(rank, help_text())
        return 0
    arg.refuse_unknown_options(parser(), arguments)
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
    _complete_environment()
    from titan_relay.titan.run import run  # torchtitan takes seconds to import

    return run(loaded.config, world_size, loaded.origins)


def parser() -> arg.CommandParser:
    """The options beside the keys, which `load_config` reads."""
    made = arg.command_parser("train", None)
    arg.add_config(made)
    made.add_argument("--print-config", action="store_true")
    made.add_argument("--plan", action="store_true")
    return made


def _place_among_ranks(environ: Mapping[str, str]) -> tuple[int, int]:
    """This process's rank and their number; alone without a launcher, whatever a batch system set.

    Raises:
        ConfigError: what a launcher sets is not what one would set.
    """
    if "RANK" not in environ:
        return 0, 1
    numbers = {name: environ[name] for name in _COUNTED if name in environ}
    for name, text in numbers.items():
        if not (text.isascii() and text.isdigit()):
            raise Place("environment", name).error(text, f"must be a whole number; {_LAUNCHED}")
    rank, world_size = int(numbers["RANK"]), int(numbers.get("WORLD_SIZE", "1"))
    if rank >= world_size:
        fix = f"must be below WORLD_SIZE, which is {world_size}; {_LAUNCHED}"
        raise Place("environment", "RANK").error(rank, fix)
    return rank, world_size


def _say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, end="" if text.endswith("\n") else "\n")


def _complete_environment() -> None:
    """Let plain `python train.py` stand in for torchrun with one process."""
    if "RANK" in os.environ:
        for name in (*_COUNTED, "MASTER_ADDR"):
            if name not in os.environ:
                raise ConfigError(f"environment: RANK is set and {name} is not: {_LAUNCHED}")
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
