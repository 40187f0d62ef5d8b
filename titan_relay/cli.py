"""The command line: `titan-relay COMMAND ...`, or `python -m titan_relay COMMAND ...`.

Exit codes of every command: 0; 1 if a run failed or the answer is no (a plan does not fit, two
models differ); 2 for a mistake of the user's, which is one line without a traceback; 130 after
Ctrl-C, as shells count. The rest is left to signals and limits.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module

from titan_relay.config import ConfigError
from titan_relay.config.suggest import nearest

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
_SECONDS_FOR_RANK_0 = 5.0

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
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("--help", "-h"):
        print(_help_text())
        return 0
    try:
        return _run(*arguments)
    except ConfigError as error:
        if _rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            # torchrun stops all ranks when the first one ends; let rank 0 speak before that.
            time.sleep(_SECONDS_FOR_RANK_0)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        if _rank() == 0:
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(name: str, *arguments: str) -> int:
    if name not in COMMANDS:
        guess = f"train {name}" if name.startswith("--") else nearest(name, COMMANDS)
        fix = f"did you mean titan-relay {guess}?" if guess else f"known: {', '.join(COMMANDS)}"
        raise ConfigError(f"titan-relay {name}: no such command; {fix}")
    try:
        exit_code: int = import_module(f"titan_relay.commands.{name}").main(arguments)
        return exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "titan_relay", "relay_kernels"):
            raise
        raise ConfigError(
            f"titan-relay {name}: {package} is not installed; pip install 'titan-relay[train]'"
        ) from error


def _help_text() -> str:
    lines = [f"  {name:<11}{meaning}" for name, meaning in COMMANDS.items()]
    head = "usage: titan-relay COMMAND ...\n\ncommands:"
    example = "example:\n  titan-relay train --config train_configs/demo.toml"
    tail = "`titan-relay COMMAND --help` says what a command takes, with examples."
    return "\n".join([head, *lines, "", example, "", tail])


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
