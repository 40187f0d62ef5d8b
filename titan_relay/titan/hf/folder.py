"""A Hugging Face folder as it lies on disk: which tensors it has and where, its `config.json`, and
the tokenizer files beside them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.hf.safetensors_file import TensorPlace, read_places, read_tensor

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
SINGLE = "model.safetensors"
TOKENIZER_CONFIG = "tokenizer_config.json"
_PIECE_VALUES = 2**22
_TOKENIZER = re.compile(
    r"tokeniz(er|ation).*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|.*\.tiktoken|tiktoken\.model|chat_template.*"
)
_OTHER_ASSETS = re.compile(r"config\.json|generation_config\.json|LICENSE.*")


@dataclass(frozen=True)
class HfFolder:
    """The tensors of a folder by name: in which file, and where there."""

    path: Path
    file_of: dict[str, str]
    places: dict[str, TensorPlace]

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        return read_tensor(self.path / self.file_of[name], self.places[name])

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Its values in order, flat, a few million at a time."""
        place = self.places[name]
        count = math.prod(place.shape)
        for first in range(0, count, _PIECE_VALUES):
            shape = (min(_PIECE_VALUES, count - first),)
            offset = place.offset + first * place.dtype.itemsize
            yield read_tensor(
                self.path / self.file_of[name], TensorPlace(shape, place.dtype, offset)
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.num_bytes for each in self.places.values())

    def fingerprint(self) -> list[list[Any]]:
        """What changes when a weight file does: names, sizes and times."""
        files = sorted(set(self.file_of.values()))
        stats = [(name, (self.path / name).stat()) for name in files]
        return [[name, each.st_size, each.st_mtime_ns] for name, each in stats]


def open_folder(path: Path) -> HfFolder:
    """Read the headers of a folder's weight files.

    Raises:
        HfError: there are none, one is missing or damaged, or the index does not agree with them.
    """
    if not path.is_dir():
        raise HfError(f"{path}: no such folder")
    index = path / INDEX
    if index.is_file():
        file_of = _weight_map(index)
        files = sorted(set(file_of.values()))
        missing = [name for name in files if not (path / name).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise HfError(f"{path} has no {missing[0]}{more}, which {INDEX} names; copy it again")
    else:
        # Without an index, every file counts; with one, only the files that it names, since some
        # folders hold a second copy of the weights in another form.
        single = path / SINGLE
        files = (
            [SINGLE]
            if single.is_file()
            else sorted(each.name for each in path.glob("*.safetensors"))
        )
        file_of = {}
    if not files:
        raise HfError(f"{path} has no .safetensors files")
    places: dict[str, TensorPlace] = {}
    found: dict[str, str] = {}
    for name in files:
        for tensor, place in read_places(path / name).items():
            if file_of and file_of.get(tensor) != name:
                continue
            if tensor in places:
                raise HfError(f"{path}: {tensor} is in {found[tensor]} and in {name}")
            places[tensor], found[tensor] = place, name
    lost = sorted(set(file_of) - set(places))
    if lost:
        raise HfError(f"{path}: {INDEX} names {lost[0]}, but {file_of[lost[0]]} does not have it")
    return HfFolder(path, found, places)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HfError(f'{index} has no "weight_map"')
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HfError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise HfError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise HfError(f"{path} holds no JSON object")
    return content


def read_config(path: Path) -> dict[str, Any]:
    """A folder's `config.json`."""
    if not path.exists():
        raise HfError(f"{path}: no such folder; name a Hugging Face folder")
    if not path.is_dir():
        raise HfError(f"{path} is a file; name the Hugging Face folder that holds {CONFIG}")
    if not (path / CONFIG).exists():
        raise HfError(f"{path} has no {CONFIG}; name a Hugging Face folder")
    return read_json(path / CONFIG)


def tokenizer_files(path: Path) -> list[Path]:
    """The tokenizer's files in a folder."""
    return _matching(path, _TOKENIZER)


def other_files(path: Path) -> list[Path]:
    """A folder's configuration and licence."""
    return _matching(path, _OTHER_ASSETS)


def _matching(path: Path, names: re.Pattern[str]) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_file() and names.fullmatch(each.name))
