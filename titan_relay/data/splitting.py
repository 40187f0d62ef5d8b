"""How text is split before byte-pair merging: by a regular expression, and inside very long runs.

A rank file is only meaningful together with the pattern it was trained with, so the known
vocabularies are named here and `[tokenizer] pattern` takes a name or an expression. The
expressions are part of those vocabularies' published definitions.

A pattern with a look-ahead needs a stack in proportion to the run of white space that it looks at,
and tiktoken panics where that is a million characters. So text for tiktoken is cut inside runs of
white space longer than `MAX_BLANK_CHARS`, and nowhere else. The `tokenizers` library copes with any
run in about linear time, and gets every text whole: a cut would change ids wherever a tokenizer
treats the start of a text in its own way (SentencePiece puts a blank there).
"""

import re
from itertools import pairwise

from titan_relay.data.documents import DataError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": _CL100K,
    "o200k": _O200K,
    "llama3": _CL100K,
    "qwen2": _CL100K.replace(r"\p{N}{1,3}", r"\p{N}"),
}
DEFAULT_PATTERN = "cl100k"
# Half of what tiktoken takes with these patterns: one of a user's may need more for a character.
MAX_BLANK_CHARS = 500_000
_RUNS = re.compile(r"\S+|\s+")
_BLANKS = re.compile(r"\s+")


def resolve_pattern(pattern: str) -> str:
    """The expression that `pattern` names, or `pattern` itself when it is an expression.

    Raises DataError for a bare word that names nothing: such a word is a typo, since as an
    expression it would match only itself and silently drop all other text.
    """
    if pattern in PATTERNS:
        return PATTERNS[pattern]
    if pattern.replace("_", "").replace("-", "").isalnum():
        known = ", ".join(sorted(PATTERNS))
        raise DataError(
            f'tokenizer.pattern = "{pattern}" is not a known pattern; use one of {known}, '
            "or a regular expression"
        )
    return pattern


def cut_long_runs(text: str, max_run_chars: int, *, blanks_only: bool = False) -> list[str]:
    """Splits `text` so that no run of white space, or of anything else, is longer than the limit.

    Returns the pieces in order; their concatenation is `text`. Linear time. With `blanks_only`,
    runs of anything else stay whole.

    Example with a limit of 3: ``"ab  cdefgh"`` -> ``["ab  cde", "fgh"]``.
    """
    if len(text) <= max_run_chars:
        return [text]
    cuts = [0]
    for run in (_BLANKS if blanks_only else _RUNS).finditer(text):
        cuts.extend(range(run.start() + max_run_chars, run.end(), max_run_chars))
    cuts.append(len(text))
    return [text[start:end] for start, end in pairwise(cuts) if start < end]
