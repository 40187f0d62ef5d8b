"""What a rank says when another rank has died or stalled: which operation it was waiting in."""

from __future__ import annotations

import re
import traceback

# Files of torch whose functions are the operations that ranks do together.
_COLLECTIVE_FILES = ("distributed_c10d.py", "_functional_collectives.py")
_HELPERS = ("wrapper", "_exception_logger", "_time_logger", "inner")
_BACKEND_WORDS = re.compile(r"gloo|nccl|ProcessGroup|Connection (closed|reset)|Timed out", re.I)


def broken_operation(error: BaseException) -> str | None:
    """The operation between ranks that `error` interrupted; None if it was no such error."""
    if not _BACKEND_WORDS.search(str(error)):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    names = [
        frame.name
        for frame in frames
        if frame.filename.endswith(_COLLECTIVE_FILES) and frame.name not in _HELPERS
    ]
    return names[-1] if names else "an operation between ranks"


def broken_message(rank: int, step: int, operation: str, error: BaseException) -> str:
    """One line for the user of this rank."""
    reason = str(error).split("\n")[0].split(" This is typically")[0]
    return (
        f"rank {rank}: step {step}: {operation} did not finish: {reason}; another rank has died "
        "or stalled: see what it said, then start again to go on from the last checkpoint"
    )
