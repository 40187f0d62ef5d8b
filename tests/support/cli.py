"""The command line in a process of its own that does not import everything again.

It takes seconds to import torch and torchtitan. Here a process is forked from a server that has
them, and runs the same ``main``; what it prints goes to files, at the level of file descriptors, so
that native code's messages are seen too.
"""

import os
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

from tests.support.distributed import ROOT, forkserver

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def run_cli(
    *arguments: str,
    command: str = "train",
    rank: int = 0,
    world_size: int = 1,
    timeout_s: float = 300.0,
) -> CompletedProcess[str]:
    """``titan-relay COMMAND ARGUMENTS`` at the project's root, as rank ``rank`` of torchrun's."""
    with tempfile.TemporaryDirectory(prefix="cli") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = forkserver().Process(
            target=_main,
            args=((command, *arguments), rank, world_size, str(out), str(err)),
            daemon=True,
        )
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"no end within {timeout_s} s:\n{err.read_text()}")
        return CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def _main(arguments: tuple[str, ...], rank: int, world_size: int, out: str, err: str) -> None:
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.chdir(ROOT)
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)
    if world_size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ["OMP_NUM_THREADS"] = "1"
    from titan_relay.cli import main

    sys.exit(main(list(arguments)))
