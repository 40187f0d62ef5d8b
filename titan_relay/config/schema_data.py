"""Keys of what a model is trained and validated on: documents, mixtures, tokenizer, validator.

``[data]`` sets what torchtitan calls ``dataloader``; ``[validator.data]`` is its
``validator.dataloader``.
"""
# ruff: noqa: RUF009  (option() and section() return dataclass fields, not shared values)

from dataclasses import dataclass
from typing import Literal

from titan_relay.config.fields import option, section


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureEntry:
    """One source of a mixture; a ``[[data.mixture]]`` table."""

    name: str = option(not_empty=True)
    """Name in logs and in the reader's checkpoint."""

    weight: float = option(above=0)
    """Share of the tokens drawn from this source; weights need not sum to 1."""

    dataset: str = option("")
    """Hub name of a dataset to stream. Give this or files."""

    subset: str = option("")
    """Configuration of the hub dataset, such as "en"."""

    split: str = option("train", not_empty=True)
    """Split of the hub dataset."""

    files: tuple[str, ...] = option((), path=True)
    """Local files or globs (.jsonl .json .parquet .txt). Give this or dataset."""

    text_column: str = option("text", not_empty=True)
    """Column or JSON key that holds a document's text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The documents: a hub dataset, local files, or a mixture of several such sources."""

    dataset: str = option("", titan="dataloader.dataset")
    """Hub name of a dataset to stream. Give one of dataset, files and mixture."""

    subset: str = option("", titan="dataloader")
    """Configuration of the hub dataset, such as "en"."""

    split: str = option("train", not_empty=True, titan="dataloader", needs="dataset")
    """Split of the hub dataset."""

    files: tuple[str, ...] = option((), path=True, titan="dataloader.dataset_path")
    """Local files or globs: .jsonl (one document per line), .json (a list of documents),
    .parquet, .txt (one document per file). Relative to the working directory."""

    text_column: str = option("text", not_empty=True, titan="dataloader")
    """Column or JSON key that holds a document's text."""

    shuffle: bool = option(True, titan="dataloader")
    """Read documents in an order drawn from debug.seed, the same for any number of ranks."""

    infinite: bool = option(True, titan="dataloader.infinite")
    """Start again after the last document. false: training ends there."""

    bad_documents: Literal["skip", "stop"] = option("skip", titan="dataloader")
    """What to do with a document that cannot be read (no text column, invalid UTF-8, broken
    JSON): count and skip it, or stop naming file and line."""

    mixture: tuple[MixtureEntry, ...] = option((), titan="dataloader")
    """Several sources with weights, one [[data.mixture]] table each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """How text becomes token ids."""

    kind: Literal["tiktoken", "huggingface"] = option("tiktoken", titan="tokenizer")
    """tiktoken: a rank file with a pattern. huggingface: a folder with tokenizer.json."""

    path: str = option("", path=True, titan="hf_assets_path")
    """The rank file, or a model's folder that has one or tokenizer.json. Relative to the working
    directory."""

    pattern: str = option("cl100k", not_empty=True, titan="tokenizer", needs='kind = "tiktoken"')
    """For tiktoken: the regular expression that splits text before merging, or the name of a
    known one: gpt2, cl100k, o200k, llama3, qwen2."""

    special_tokens: dict[str, int] = option({}, titan="tokenizer", needs='kind = "tiktoken"')
    """For tiktoken: special tokens and their ids, such as {"<|endoftext|>" = 4095}. With a folder
    as path, beside those of its tokenizer_config.json."""

    bos_token: str | None = option(None, not_empty=True, titan="tokenizer")
    """Token that starts a document. none: the tokenizer's own, if it has one."""

    eos_token: str | None = option(None, not_empty=True, titan="tokenizer")
    """Token that ends a document. none: the tokenizer's own, if it has one."""

    add_bos: bool = option(False, titan="tokenizer")
    """Put the bos token before every document."""

    add_eos: bool = option(True, titan="tokenizer")
    """Put the eos token after every document."""

    allow_special_in_text: bool = option(False, titan="tokenizer")
    """Read the spelling of a special token inside a document as that token. false: as text."""


def _validation_data() -> DataConfig:
    return DataConfig(infinite=False, shuffle=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidatorConfig:
    """Loss on held-out documents while training."""

    enable: bool = option(False)
    """Validate at step 1 and then every freq steps."""

    freq: int = option(10, at_least=1)
    """Steps between validations."""

    steps: int = option(-1, at_least=1, also=(-1,))
    """Batches per validation. -1: the whole of validator.data."""

    data: DataConfig = section(_validation_data)
    """The held-out documents; keys as in [data], but neither infinite nor shuffled."""
