"""Is there something to read, and something to read it with?

File checks look at names only; what is inside is found out by the readers.
"""

from collections.abc import Iterator
from pathlib import Path

from titan_relay.config.errors import Origins, Refusal, either
from titan_relay.config.schema import DataConfig, MixtureEntry, RunConfig, TokenizerConfig
from titan_relay.data.documents import DataError
from titan_relay.data.local_files import check_files
from titan_relay.data.splitting import PATTERNS, resolve_pattern
from titan_relay.data.tokenizer_files import tokenizer_file

_RANK_FILE_SUFFIXES = (".tiktoken", ".model", ".txt", ".bpe")


def check_data(config: RunConfig, origins: Origins, *, files: bool) -> None:
    """Raise `ConfigError` for missing or ambiguous data; look for `files` only if asked to."""
    origins.refuse(config, _check_data(config, files=files))


def _check_data(config: RunConfig, *, files: bool) -> Iterator[Refusal]:
    sections = {"data": config.data}
    if config.validator.enable:
        sections["validator.data"] = config.validator.data
    for section, data in sections.items():
        yield from check_documents(section, data)
    if config.validator.enable and config.validator.steps == -1 and config.validator.data.infinite:
        yield Refusal(
            "validator.data.infinite",
            "validator.steps = -1 reads all of it, which would never end; use false, or a "
            "number of validator.steps",
        )
    yield from _check_tokenizer(config)
    if files:
        for section, data in sections.items():
            yield from check_files(f"{section}.files", data.files)
            for entry in data.mixture:
                yield from check_files(f"{section}.mixture", entry.files)
        yield from _check_tokenizer_path(config.tokenizer)


def check_documents(section: str, data: DataConfig) -> Iterator[Refusal]:
    """Yield a `Refusal` unless `section` names its documents in one way, each entry its own.

    Refusals come with their values: a reader has no more than the section.
    """
    given = [name for name in ("dataset", "files", "mixture") if getattr(data, name)]
    if not given:
        yield Refusal(
            f"{section}.files",
            f"no documents; give {section}.files, {section}.dataset or {section}.mixture",
            data.files,
        )
    if len(given) > 1:
        yield Refusal(
            f"{section}.{given[1]}",
            f"{section}.{given[0]} is given too; give one of them",
            _shown(getattr(data, given[1])),
        )
    if data.subset and not data.dataset:
        yield Refusal(f"{section}.subset", f"needs {section}.dataset", data.subset)
    names = [entry.name for entry in data.mixture]
    for index, entry in enumerate(data.mixture):
        yield from _check_entry(f"{section}.mixture", index, entry, names)


def _check_entry(key: str, index: int, entry: MixtureEntry, names: list[str]) -> Iterator[Refusal]:
    if names.index(entry.name) != index:
        yield Refusal(key, f'the name "{entry.name}" is there twice; give each its own', names)
    if bool(entry.dataset) == bool(entry.files):
        yield Refusal(key, f'"{entry.name}" needs either dataset or files, and not both', names)
    if not entry.weight > 0:  # of an entry that a program made; a file's are read so
        yield Refusal(key, f'weight = {entry.weight} of "{entry.name}" must be above 0', names)


def _shown(value: object) -> object:
    """A mixture by its names, anything else as it is."""
    if isinstance(value, tuple) and value and isinstance(value[0], MixtureEntry):
        return [entry.name for entry in value]
    return value


def _check_tokenizer(config: RunConfig) -> Iterator[Refusal]:
    tokenizer, vocab_size = config.tokenizer, config.model.vocab_size
    if not tokenizer.path:
        yield Refusal(
            "tokenizer.path", "name a tiktoken rank file or a Hugging Face tokenizer folder"
        )
    if tokenizer.kind == "tiktoken":
        yield from _check_pattern(tokenizer)
        for part in ("bos", "eos"):
            # A model's folder may name its tokens; `load_tokenizer` looks there.
            is_file = Path(tokenizer.path).suffix in _RANK_FILE_SUFFIXES
            unnamed = getattr(tokenizer, f"{part}_token") is None
            if getattr(tokenizer, f"add_{part}") and unnamed and is_file:
                yield Refusal(
                    f"tokenizer.{part}_token",
                    f"a rank file names no {part} token; name one, or set tokenizer.add_{part} "
                    "= false",
                )
    for token, token_id in tokenizer.special_tokens.items():
        if token_id >= vocab_size:
            yield Refusal(
                "tokenizer.special_tokens",
                f"must be below model.vocab_size = {vocab_size}",
                {token: token_id},
            )
    if len(set(tokenizer.special_tokens.values())) < len(tokenizer.special_tokens):
        yield Refusal("tokenizer.special_tokens", "every token needs its own id")


def _check_pattern(tokenizer: TokenizerConfig) -> Iterator[Refusal]:
    """A bare word that is no known name is a typo: as an expression it matches only itself."""
    try:
        resolve_pattern(tokenizer.pattern)
    except DataError:
        yield Refusal("tokenizer.pattern", f"must be {either(PATTERNS)}, or a regular expression")


def _check_tokenizer_path(tokenizer: TokenizerConfig) -> Iterator[Refusal]:
    try:
        tokenizer_file(tokenizer)
    except DataError as error:
        yield Refusal("tokenizer.path", str(error))
