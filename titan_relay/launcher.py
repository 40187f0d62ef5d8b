"""Between this process and what started it: torchrun's ranks, a batch system's tasks, or nobody.

Nothing here needs torch: a mistake is found, and said, before anything heavy is imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from titan_relay.config.errors import ConfigError, Place

_COUNTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h: the signal that the parent's end sends
_WATCH_SECONDS = 1.0
_LAUNCHED = "torchrun sets it; to train on one process, unset RANK"
# Of each way to start tasks: what counts them, what marks one, and what counts the nodes' own.
_TASKS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"),
    ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_TASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
)


_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_ERROR_FILE_HERE = "TITAN_RELAY_ERROR_FILE"
_SECONDS_FOR_OTHERS = 5.0  # torchrun ends all ranks when the first one ends


def others_speak() -> bool:
    """Whether torchrun started this process as another rank than 0, which speaks for all."""
    return os.environ.get("RANK", "").lstrip("0").isdigit()


def say_error(message: str, *, alike: bool = False) -> None:
    """Print why this process fails, and leave it to torchrun to repeat at the end of its report.

    alike: every rank has this error, as a rule, so that rank 0 speaks for all.
    """
    if not (alike and others_speak()):
        print(f"error: {message}", file=sys.stderr, flush=True)
    tell_launcher(message)


def tell_launcher(message: str) -> None:
    """Write what torchrun shows as "Root Cause" if this rank is the first that wrote something.

    In the form of `ErrorHandler` of torch.distributed.elastic.multiprocessing.errors, without the
    traceback that it would show in the place of the message. What was written first stays.
    """
    path = _error_file()
    if path is None:
        return
    extra = {"timestamp": str(int(time.time()))}
    with suppress(OSError), Path(path).open("x") as file:
        json.dump({"message": {"message": f"error: {message}", "extraInfo": extra}}, file)


def _error_file() -> str | None:
    return os.environ.get(_ERROR_FILE) or os.environ.get(_ERROR_FILE_HERE)


def wait_for_others() -> None:
    """Let the rank speak, and end, that knows the cause: torchrun reports the one that ends first.

    It ends this process meanwhile, so nobody waits where there is a cause.
    """
    if _error_file() is not None:
        time.sleep(_SECONDS_FOR_OTHERS)


def place_among_ranks(environ: Mapping[str, str], arguments: Sequence[str]) -> tuple[int, int]:
    """This process's rank and their number; (0, 1) without a launcher.

    arguments: those of `titan-relay train`, for the command to start instead.

    Raises:
        ConfigError: what a launcher sets is not what one would set, or a batch system has started
            several tasks that do not know of each other.
    """
    if "RANK" not in environ:
        _refuse_several_tasks(environ, arguments)
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


def _refuse_several_tasks(environ: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Raise `ConfigError` in a task of several, each of which would train the whole run by itself.

    An allocation counts the tasks that it has room for, a script of sbatch is marked as its first
    one, and a shell of salloc runs in none: only srun's own tasks have a step.
    """
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ:
        environ = {name: environ[name] for name in environ if not name.startswith("SLURM_")}
    for counts, marks, of_node in _TASKS:
        text = environ.get(counts, "")
        if marks not in environ or not (text.isascii() and text.isdigit()):
            continue
        if int(text) > 1:
            command = _torchrun(int(text), environ.get(of_node, ""), arguments)
            raise Place("environment", counts).error(
                int(text),
                "each of these tasks would train the whole run by itself; start its ranks by "
                f"{command} (to train in this task alone, unset {marks})",
            )
        return


def _torchrun(num_tasks: int, of_node: str, arguments: Sequence[str]) -> str:
    """The command that starts as many ranks; `of_node` as Slurm writes it, such as "4(x2)"."""
    local = of_node.partition("(")[0].partition(",")[0]
    num_local = int(local) if local.isdigit() and int(local) else num_tasks
    nodes, where = -(-num_tasks // num_local), ""
    if nodes > 1:
        where = f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint HOST:29400 "
    rest = shlex.join(["-m", "titan_relay", "train", *arguments])
    command = f"torchrun {where}--nproc_per_node {num_local} {rest}"
    return f"one task a node: {command}" if nodes > 1 else command


def end_with_launcher() -> None:
    """Let this rank end when torchrun does, however that ended: an orphan would train and save on,
    beside the run that is started next.

    Linux ends it at once; elsewhere, and if torchrun ends during this call, a thread sees to it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def complete_environment() -> None:
    """Let plain `python train.py` stand in for torchrun with one process, and this process alone
    say why it fails.

    Raises:
        ConfigError: a launcher has set some of its variables and not others.
    """
    if path := os.environ.pop(_ERROR_FILE, ""):
        # torchtitan's trainer leaves a traceback there for any exception: of a mistake that is one
        # line here, and of a rank that only lost another.
        os.environ[_ERROR_FILE_HERE] = path
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
