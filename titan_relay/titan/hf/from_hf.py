"""From a Hugging Face folder to a checkpoint of this project, a few tensors at a time.

The checkpoint gets a folder `hf` beside its weights, with the configuration, the tokenizer and the
index of the source, from which `to_hf` restores them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torchtitan.tools.logging import logger

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.hf.check_weights import check_weights
from titan_relay.titan.hf.config_json import first_difference, mtp_layers
from titan_relay.titan.hf.dcp import PartsWriter
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.hf.export import shard_numbers
from titan_relay.titan.hf.folder import (
    CONFIG,
    INDEX,
    HfFolder,
    open_folder,
    other_files,
    read_config,
    tokenizer_files,
)
from titan_relay.titan.hf.names import Entry, NameMap
from titan_relay.titan.hf.number_range import Cast, RangeError
from titan_relay.titan.hf.progress import Journal, OnDone, Progress, ignore
from titan_relay.titan.hf.safe_pickle import METADATA
from titan_relay.titan.hf.safetensors_file import StoredTensor
from titan_relay.units import in_gb

ASSETS = "hf"
JOURNAL = ".conversion.jsonl"
PART_BYTES = 256 * 2**20


def from_hf(
    source: Path,
    model: ModelConfig,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    skip: str = "",
    part_bytes: int = PART_BYTES,
    on_done: OnDone = ignore,
) -> None:
    """Convert; goes on where an earlier call with the same arguments was killed.

    Args:
        dtype: of the parameters; None keeps the source's.
        skip: a regular expression of tensors to leave out although the model lacks them.
        part_bytes: about how much is read and written at a time.
        on_done: told the first tensor of each part once it is on disk.

    Raises:
        HfError: source and model do not fit, or `out` cannot be written to.
        RangeError: `dtype` cannot hold a weight; `out` is gone.
    """
    folder, names = open_checked(source, model, skip=skip)
    tensors = _stored_tensors(names, folder, dtype)
    if (out / METADATA).exists():
        raise HfError(f"{out} is a complete checkpoint already; name another folder, or delete it")
    parts = _parts(tensors, part_bytes)
    num_bytes = sum(each.num_bytes for each in tensors.values())
    work = [[source.name, str(dtype)], folder.fingerprint(), [list(each) for each in parts]]
    journal = open_journal(out, work, num_bytes)
    cast = Cast()
    writer = PartsWriter(
        out, parts, lambda name: _value(names, folder, name, tensors[name].dtype, cast)
    )
    progress = Progress("from-hf", len(tensors), num_bytes, on_done)
    for index, part in enumerate(parts):
        num_bytes = sum(each.num_bytes for each in part.values())
        if str(index) in journal.done:
            progress.skip(len(part), num_bytes)
            continue
        with nothing_left(out):
            journal.add(str(index), writer.write(index))
        progress.advance(next(iter(part)), num_bytes, len(part))
    _copy_assets(source, out / ASSETS)
    writer.finish([journal.done[str(index)] for index in range(len(parts))])
    journal.remove()
    cast.log()


@contextmanager
def nothing_left(out: Path) -> Iterator[None]:
    """Delete a conversion's folder where a weight is out of range: going on would not help."""
    try:
        yield
    except RangeError:
        shutil.rmtree(out)
        raise


def open_checked(source: Path, model: ModelConfig, *, skip: str = "") -> tuple[HfFolder, NameMap]:
    """A folder that has exactly the model's configuration and tensors.

    Raises:
        HfError: it has not; one line with the first difference, the whole list is logged.
    """
    config = read_config(source)
    if difference := first_difference(model, config, source / CONFIG):
        raise HfError(f"{difference}; `titan-relay convert config` prints the [model] of a folder")
    folder = open_folder(source)
    names = NameMap(model)
    check_weights(names, folder, mtp_layers=mtp_layers(config), skip=skip)
    return folder, names


def open_journal(out: Path, work: object, num_bytes: int) -> Journal:
    """The journal of a conversion into `out`, once there is room for what is still to be written.

    Raises:
        HfError: the folder cannot be made, holds something else, or the disk is too small.
    """
    path = out / JOURNAL
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not path.exists() and any(out.iterdir()):
            raise HfError(f"{out} is not empty; name another folder, or delete it")
        free_bytes = shutil.disk_usage(out).free
        there_bytes = sum(each.stat().st_blocks * 512 for each in out.iterdir() if each.is_file())
        if num_bytes > free_bytes + there_bytes:
            raise HfError(
                f"{out}: {in_gb(num_bytes)} are to be written, and "
                f"{in_gb(free_bytes + there_bytes)} are free"
            )
        journal = Journal(path, work)
    except OSError as error:
        raise HfError(f"{out} cannot be written to: {error.strerror}") from error
    if journal.done:
        logger.info(f"{out}: going on behind what an earlier call finished")
    return journal


def _stored_tensors(
    names: NameMap, folder: HfFolder, dtype: torch.dtype | None
) -> dict[str, StoredTensor]:
    tensors = {}
    for entry in names.entries:
        if not entry.parts and not entry.is_buffer:
            raise HfError(f"{entry.name} has no name in Hugging Face's folders")
        tensors[entry.name] = StoredTensor(entry.shape, _dtype(entry, folder, dtype))
    zero = [entry.name for entry in names.entries if not entry.parts]
    if zero:
        logger.info(f"{len(zero)} buffers that Hugging Face does not have start at zero: {zero[0]}")
    return tensors


def _dtype(entry: Entry, folder: HfFolder, dtype: torch.dtype | None) -> torch.dtype:
    if not entry.parts:
        return entry.dtype
    if dtype is not None and not entry.is_buffer:
        return dtype
    dtypes = {folder.places[name].dtype for name in entry.parts}
    if len(dtypes) > 1:
        kinds = " and ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
        raise HfError(
            f"{folder.path}: the tensors of {entry.name} are {kinds}; choose one with --dtype"
        )
    return dtypes.pop()


def _value(
    names: NameMap, folder: HfFolder, name: str, dtype: torch.dtype, cast: Cast
) -> torch.Tensor:
    entry = names.by_name[name]
    if not entry.parts:
        return torch.zeros(entry.shape, dtype=dtype)
    values = {part: cast(part, folder.read(part), dtype) for part in entry.parts}
    return names.from_hf(entry, values).contiguous()


def _parts(tensors: dict[str, StoredTensor], part_bytes: int) -> list[dict[str, StoredTensor]]:
    """Neighbours together until a part is large enough; a writer holds a part in memory."""
    numbers = shard_numbers({name: each.num_bytes for name, each in tensors.items()}, part_bytes)
    parts: list[dict[str, StoredTensor]] = [{} for _ in set(numbers.values())]
    for name, each in tensors.items():
        parts[numbers[name] - 1][name] = each
    return parts


def _copy_assets(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    index = source / INDEX
    files = [*other_files(source), *tokenizer_files(source)]
    for file in [*files, *([index] if index.is_file() else [])]:
        shutil.copyfile(file, target / file.name)
