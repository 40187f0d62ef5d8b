"""Types of command-line arguments that the scripts about lengths and budgets share."""

import argparse
import math


def variants(text: str) -> list[str]:
    """Names between commas."""
    # Imports torchtitan, which takes seconds and which not every script needs to read arguments.
    from titan_relay.titan.plan.variants import VARIANTS

    names = text.split(",")
    for name in names:
        if name not in VARIANTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(VARIANTS)}")
    return names


def at_least_1(text: str) -> int:
    """An integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def above_0(text: str) -> float:
    """A finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return number
