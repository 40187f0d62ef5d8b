"""`titan-relay train`, which is also `train.py`: a run, its final configuration, or its plan.

Every rank validates before anything heavy is imported or any process group starts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from titan_relay.commands import arguments as arg
from titan_relay.config import load_config, to_toml
from titan_relay.config.reference import help_text
from titan_relay.launcher import complete_environment, end_with_launcher, place_among_ranks
from titan_relay.validate import validate


def main(arguments: Sequence[str]) -> int:
    """Train, or answer what is asked for instead; returns the process's exit code."""
    end_with_launcher()
    rank, world_size = place_among_ranks(os.environ, arguments)
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
    complete_environment()
    from titan_relay.titan.run import run  # torchtitan takes seconds to import

    return run(loaded.config, world_size, loaded.origins)


def parser() -> arg.CommandParser:
    """The options beside the keys, which `load_config` reads."""
    made = arg.command_parser("train", None)
    arg.add_config(made)
    made.add_argument("--print-config", action="store_true")
    made.add_argument("--plan", action="store_true")
    return made


def _say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, end="" if text.endswith("\n") else "\n")
