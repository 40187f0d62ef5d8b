"""What a model's own folder says about its tokenizer: which file, which special tokens.

Hugging Face folders have `tokenizer.json`, or, for some models, the rank file of a tiktoken
vocabulary; `tokenizer_config.json` beside it names special tokens.
"""

import json
from pathlib import Path
from typing import Any

from titan_relay.data.errors import DataError

_CONFIG = "tokenizer_config.json"
# A file named tokenizer.model is a rank file in some models and of another kind in most.
_RANK_FILES = ("*.tiktoken", "tiktoken.model", "tokenizer.model")


def rank_file_of(folder: Path) -> Path:
    """The tiktoken rank file of a folder.

    Raises DataError where there is none, or several.
    """
    for pattern in _RANK_FILES:
        found = sorted(each for each in folder.glob(pattern) if each.is_file())
        if len(found) > 1:
            names = " and ".join(each.name for each in found)
            raise DataError(f'tokenizer.path = "{folder}" has {names}; name one of the files')
        if found:
            return found[0]
    hint = '; use kind = "huggingface"' if (folder / "tokenizer.json").is_file() else ""
    raise DataError(f'tokenizer.path = "{folder}" has no tiktoken rank file{hint}')


def named_boundaries(folder: Path) -> tuple[str | None, str | None]:
    """The BOS and EOS tokens that the folder names."""
    content = _read_config(folder)

    def named(key: str) -> str | None:
        value = content.get(key)
        return value.get("content") if isinstance(value, dict) else value

    return named("bos_token"), named("eos_token")


def named_specials(folder: Path) -> dict[str, int]:
    """The special tokens that the folder lists, with their ids."""
    listed = _read_config(folder).get("added_tokens_decoder", {})
    return {entry["content"]: int(token_id) for token_id, entry in listed.items()}


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    return content
