"""Regular expressions that split text into pieces before byte-pair merging.

A rank file is only meaningful together with the pattern it was trained with, so the known
vocabularies are named here and `[tokenizer] pattern` takes a name or an expression. The
expressions are part of those vocabularies' published definitions.
"""

from titan_relay.data.errors import DataError

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
