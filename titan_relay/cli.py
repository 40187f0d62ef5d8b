"""The command line: `titan-relay COMMAND ...`, or `python -m titan_relay COMMAND ...`.

Exit codes of every command: 0; 1 if a run failed or the answer is no (a plan does not fit, two
models differ); 2 for a mistake of the user's, which is one line without a traceback; 75 of a run
that a signal or its time limit ended early, to go on when it is started again; 130 after Ctrl-C and
141 where nobody reads the output any more, as shells count.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module, metadata
from typing import Any

from titan_relay.commands.arguments import UnknownOption
from titan_relay.config import ConfigError
from titan_relay.config.errors import either
from titan_relay.config.suggest import nearest
from titan_relay.launcher import others_speak, say_error, tell_launcher, wait_for_others

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_READER_GONE = 141  # 128 + SIGPIPE

COMMANDS = {
    "train": "train the model that a TOML file describes",
    "plan": "say what memory a run takes, and whether it fits a device, before it starts",
    "longest": "find the longest sequence that fits a device",
    "count": "count a model's parameters, and the FLOPs of a token",
    "convert": "convert weights from a Hugging Face folder, or to one",
    "compare": "compare a step with the same step in transformers",
    "tokenizer": "train a byte-level BPE on text files",
    "corpus": "write a corpus of source code without a download",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; returns the process's exit code."""
    try:
        exit_code = _run(*(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:  # None where it was closed before the start
            sys.stdout.flush()
        return exit_code
    except ConfigError as error:
        say_error(_with_owners(error), alike=True)
        if others_speak():
            wait_for_others()
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        if not others_speak():
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        return _end_of_files(error)
    except Exception as error:  # a fault of ours, shown with its traceback
        tell_launcher(f"{type(error).__name__}: {error}")
        raise


def _run(name: str = "help", *arguments: str) -> int:
    if name in ("help", "--help", "-h"):
        if name == "help" and arguments:
            return _run(*arguments, "--help")
        print(_help_text())
        return 0
    if name == "--version":
        print(_versions())
        return 0
    if name not in COMMANDS:
        guess = f"train {name}" if name.startswith("--") else nearest(name, [*COMMANDS, "help"])
        fix = f"did you mean titan-relay {guess}?" if guess else f"known: {', '.join(COMMANDS)}"
        raise ConfigError(f"titan-relay {name}: no such command; {fix}")
    try:
        exit_code: int = _command(name).main(arguments)
        return exit_code
    except SystemExit as end:  # argparse ends so after --help
        return int(end.code or 0)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "titan_relay", "relay_kernels"):
            raise
        raise ConfigError(
            f"titan-relay {name}: {package} is not installed; pip install 'titan-relay[train]'"
        ) from error


def _command(name: str) -> Any:
    return import_module(f"titan_relay.commands.{name}")


def _with_owners(error: ConfigError) -> str:
    """The message; of an option that other commands have, with their names."""
    if isinstance(error, UnknownOption):
        owners = [name for name in COMMANDS if error.option in _command(name).parser().options()]
        if owners:
            names = either(f"titan-relay {name}" for name in owners)
            return f"{error.command}: {error.option}: no such option; {names} has it"
    return str(error)


def _end_of_files(error: OSError) -> int:
    """The exit code after a file or the output failed, which is said; raises what is our bug."""
    if _reader_has_gone():  # as in `titan-relay ... | head -1`: nothing to say, to nobody
        _forget_output()
        return EXIT_READER_GONE
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        _forget_output()
    elif error.filename is None:
        tell_launcher(f"{type(error).__name__}: {error}")
        raise error
    place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    say_error(f"{place}{error.strerror}")
    return EXIT_FAILED


def _reader_has_gone() -> bool:
    try:
        poll = select.poll()
        poll.register(sys.stdout, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, TypeError, ValueError):
        return False  # closed, or no file of the system's


def _forget_output() -> None:
    """Drop what is still to be written: Python would try again, and complain, at exit."""
    with suppress(AttributeError, ValueError):  # closed, or no file of the system's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help_text() -> str:
    lines = [f"  {name:<11}{meaning}" for name, meaning in COMMANDS.items()]
    head = "usage: titan-relay COMMAND ... | help [COMMAND] | --version\n\ncommands:"
    example = "example:\n  titan-relay train --config FILE.toml"
    tail = "`titan-relay COMMAND --help` says what a command takes, with examples."
    return "\n".join([head, *lines, "", example, "", tail])


def _versions() -> str:
    def version(package: str) -> str:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            return f"{package} not installed"

    own, *others = map(version, ("titan-relay", "torch", "torchtitan", "triton"))
    return f"{own} ({', '.join(others)})"
