"""Types of command-line arguments that scripts share."""

import argparse
import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

N = TypeVar("N", int, float)


def variants(text: str) -> list[str]:
    """Names between commas."""
    # Imports torchtitan, which takes seconds and which not every script needs to read arguments.
    from titan_relay.titan.plan.variants import VARIANTS

    names = text.split(",")
    for name in names:
        if name not in VARIANTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(VARIANTS)}")
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(f"{name!r} is there twice")
    return names


def at_least_1(text: str) -> int:
    """An integer of at least 1."""
    number = _number(int, text, "a whole number")
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def at_least_0(text: str) -> float:
    """A finite number of at least 0."""
    number = _number(float, text, "a number")
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number of at least 0")
    return number


def above_0(text: str) -> float:
    """A finite number above 0."""
    number = _number(float, text, "a number")
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return number


def file_to_write(text: str) -> Path:
    """A file that can be written once there is something to write."""
    path = Path(text)
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a folder; name a file in it")
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: cannot be written: {error.strerror}") from error
    return path


def parse_with_keys(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """The script's own arguments, and those that are configuration keys.

    Ends the script where a word without a section looks like one of its own options.
    """
    args, keys = parser.parse_known_args(argv)
    options = [option for action in parser._actions for option in action.option_strings]
    for word in keys:
        name = word.partition("=")[0]
        if name.startswith("--") and "." not in name:
            close = get_close_matches(name, options, n=1, cutoff=0.75)
            if close:
                parser.error(f"{name}: no such option; did you mean {close[0]}?")
    return args, keys


def _number(kind: Callable[[str], N], text: str, words: str) -> N:
    try:
        return kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {words}") from error
