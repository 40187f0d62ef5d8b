"""Cuts very long runs of one kind of character, which regular-expression splitters choke on.

A split pattern with a look-ahead needs stack or back-tracking in proportion to the longest
run of white space (tiktoken panics on a run of a million blanks), and byte-pair merging of one
piece costs more than linear time. Text is therefore cut inside runs longer than
`MAX_RUN_CHARS`, and nowhere else: ordinary text keeps exactly the ids it would have.
"""

import re
from itertools import pairwise

MAX_RUN_CHARS = 20_000
_RUNS = re.compile(r"\S+|\s+")


def cut_long_runs(text: str, max_run_chars: int = MAX_RUN_CHARS) -> list[str]:
    """Splits `text` so that no run of white space, or of anything else, is longer than the limit.

    Returns the pieces in order; their concatenation is `text`. Linear time.

    Example with a limit of 3: ``"ab  cdefgh"`` -> ``["ab  cde", "fgh"]``.
    """
    if len(text) <= max_run_chars:
        return [text]
    cuts = [0]
    for run in _RUNS.finditer(text):
        cuts.extend(range(run.start() + max_run_chars, run.end(), max_run_chars))
    cuts.append(len(text))
    return [text[start:end] for start, end in pairwise(cuts) if start < end]
