"""Which Hugging Face tensors each tensor of a model is made of, from the family's adapter.

The adapter translates whole state dicts. Given one tensor on the meta device it says which tensors
of a Hugging Face folder belong to it, with their shapes; so a model of any size can be checked and
converted tensor by tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.model.families import FAMILIES, build_model_config

HEAD = "lm_head.weight"  # here and in every folder
_EMBEDDING = "tok_embeddings.weight"


@dataclass(frozen=True)
class Entry:
    """One tensor of this project's model.

    parts: shape of each Hugging Face tensor it is made of; empty where Hugging Face has none.
    is_buffer: not trained, and kept in its own dtype.
    tied: a second name of the embedding, which Hugging Face writes once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[str, tuple[int, ...]]
    is_buffer: bool
    tied: bool = False


class NameMap:
    """Entries of a model, and the translation of their values."""

    def __init__(self, model: ModelConfig) -> None:
        config = build_model_config(model, seed=0, cpu=True)
        with torch.device("meta"):
            module = config.build()
        self.adapter: BaseStateDictAdapter = FAMILIES[model.family].adapter(config, None)
        self._tied = model.tie_word_embeddings
        parameters = {name for name, _ in module.named_parameters()}
        self.entries = [
            self._entry(name, value, is_buffer=name not in parameters)
            for name, value in module.state_dict().items()
        ]
        self.by_name = {each.name: each for each in self.entries}

    def _entry(self, name: str, value: torch.Tensor, *, is_buffer: bool) -> Entry:
        tied = self._tied and name == HEAD
        source = _EMBEDDING if tied else name
        parts = {key: tuple(each.shape) for key, each in self.to_hf(source, value).items()}
        return Entry(
            name,
            tuple(value.shape),
            value.dtype,
            parts,
            is_buffer=is_buffer and not tied,
            tied=tied,
        )

    @property
    def tied_head(self) -> tuple[str, str] | None:
        """A folder's names of a head that is the embedding and may be stored too, and of that."""
        parts = [next(iter(each.parts)) for each in self.entries if each.tied]
        return (HEAD, parts[0]) if parts else None

    @property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that a Hugging Face folder of this model has."""
        return {name: shape for entry in self.entries for name, shape in entry.parts.items()}

    def to_hf(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """The Hugging Face tensors of one tensor of ours."""
        return self.adapter.to_hf({name: value})

    def from_hf(self, entry: Entry, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """One tensor of ours from `entry.parts`' values."""
        name = _EMBEDDING if entry.tied else entry.name
        values = dict(values)
        if self._tied:
            # Adapters take a missing head from the embedding, which this entry may not have.
            values.setdefault(HEAD, torch.empty(0))
        value = self.adapter.from_hf(values)[name]
        if tuple(value.shape) != entry.shape:
            raise HfError(f"{name} became {tuple(value.shape)} instead of {entry.shape}")
        return value
