"""Types of command-line arguments that the scripts about lengths and budgets share."""

import argparse
import math
from collections.abc import Callable
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


def above_0(text: str) -> float:
    """A finite number above 0."""
    number = _number(float, text, "a number")
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return number


def _number(kind: Callable[[str], N], text: str, words: str) -> N:
    try:
        return kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {words}") from error
