"""From a checkpoint of this project to a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torchtitan.tools.logging import logger

from titan_relay.config.schema import ModelConfig
from titan_relay.titan.hf.check_weights import refuse_faults
from titan_relay.titan.hf.dcp import PartsReader
from titan_relay.titan.hf.export import (
    SHARD_BYTES,
    exported_config,
    files_to_copy,
    shard_files,
    write_assets,
    write_index,
)
from titan_relay.titan.hf.folder import INDEX, read_json
from titan_relay.titan.hf.from_hf import ASSETS, nothing_left, open_journal
from titan_relay.titan.hf.names import NameMap
from titan_relay.titan.hf.number_range import Cast
from titan_relay.titan.hf.progress import OnDone, Progress, ignore
from titan_relay.titan.hf.safetensors_file import FileLayout, StoredTensor, flush_to_disk

_OTHER_STATE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
_BIAS = ".expert_bias_E"


@dataclass(frozen=True)
class ExportOptions:
    """How a folder is written.

    dtype: of the parameters; None keeps the checkpoint's.
    assets: a folder with `config.json` and tokenizer files to copy; None: those that `from_hf` left
        in the checkpoint, or none.
    tokenizer: its files, if they are not to be those of `assets`.
    shard_bytes: the largest file, unless `assets` has an index of the same tensors.
    """

    dtype: torch.dtype | None = None
    assets: Path | None = None
    tokenizer: Sequence[Path] = ()
    shard_bytes: int = SHARD_BYTES


AS_STORED = ExportOptions()


def to_hf(
    checkpoint: Path,
    model: ModelConfig,
    out: Path,
    options: ExportOptions = AS_STORED,
    *,
    on_done: OnDone = ignore,
) -> None:
    """Convert; goes on where an earlier call with the same arguments was killed.

    Args:
        on_done: told each tensor once it is on disk.

    Raises:
        HfError: the checkpoint is damaged or of another model, or `out` cannot be written to.
        RangeError: `options.dtype` cannot hold a weight; `out` is gone.
    """
    reader, names, assets = PartsReader(checkpoint), NameMap(model), options.assets
    check_tensors(names, reader, checkpoint)
    tensors = _hf_tensors(names, reader, options.dtype)
    if assets is None and (checkpoint / ASSETS).is_dir():
        assets = checkpoint / ASSETS
    weights_dtype = tensors[next(iter(names.hf_shapes))].dtype
    config = exported_config(model, assets, weights_dtype)
    file_of = _source_files(tensors, assets) or shard_files(
        {name: each.num_bytes for name, each in tensors.items()}, options.shard_bytes
    )
    layouts = {
        file: FileLayout((n, t.dtype, t.shape) for n, t in tensors.items() if file_of[n] == file)
        for file in sorted(set(file_of.values()))
    }
    metadata = (checkpoint / ".metadata").stat()
    work = [str(options.dtype), metadata.st_size, metadata.st_mtime_ns, sorted(file_of.items())]
    num_bytes = sum(each.num_bytes for each in layouts.values())
    journal = open_journal(out, work, num_bytes)
    for file, layout in layouts.items():
        if not journal.done or not _unfinished(out / file).exists():
            layout.create(_unfinished(out / file))
    entries = [each for each in names.entries if each.parts and not each.tied]
    written_bytes = sum(each.num_bytes for each in tensors.values())
    cast = Cast()
    progress = Progress("to-hf", len(entries), written_bytes, on_done)
    for entry in entries:
        size_bytes = sum(tensors[name].num_bytes for name in entry.parts)
        if entry.name in journal.done:
            progress.skip(1, size_bytes)
            continue
        with nothing_left(out):
            value = cast(
                entry.name, reader.read(entry.name), tensors[next(iter(entry.parts))].dtype
            )
        for name, part in names.to_hf(entry.name, value).items():
            layouts[file_of[name]].write(_unfinished(out / file_of[name]), name, part)
        del value, part  # freed before the next is read
        for file in {file_of[name] for name in entry.parts}:
            flush_to_disk(_unfinished(out / file))
        journal.add(entry.name)
        progress.advance(entry.name, size_bytes)
    cast.log()
    _say_what_is_lost(names, reader)
    for file in layouts:
        _unfinished(out / file).rename(out / file)
    _write_index(out, file_of, tensors, assets)
    write_assets(out, config, files_to_copy(assets, list(options.tokenizer)))
    journal.remove()


def check_tensors(names: NameMap, reader: PartsReader, path: Path, *, every: bool = False) -> None:
    """Refuse a checkpoint that is not of this model; the whole list is logged.

    Args:
        every: also what Hugging Face has no place for must be there, as training needs it.

    Raises:
        HfError: one line with how many tensors are wrong, and the first of each kind.
    """
    there = {n: t for n, t in reader.tensors.items() if not n.startswith(_OTHER_STATE)}
    needed = [each for each in names.entries if every or (each.parts and not each.tied)]
    # A checkpoint may have balancing biases that this configuration does not use.
    unexpected = [n for n in there if n not in names.by_name and not n.endswith(_BIAS)]
    other = [
        f"{each.name}: {list(there[each.name].shape)} in the checkpoint, {list(each.shape)} here"
        for each in needed
        if each.name in there and there[each.name].shape != each.shape
    ]
    found = {
        "missing": [each.name for each in needed if each.name not in there],
        "unexpected": sorted(unexpected),
        "of another shape": other,
    }
    refuse_faults(path, found)


def _hf_tensors(
    names: NameMap, reader: PartsReader, dtype: torch.dtype | None
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for entry in names.entries:
        if entry.tied or not entry.parts:
            continue
        stored = reader.tensors[entry.name].dtype
        kept = stored if dtype is None or entry.is_buffer else dtype
        tensors |= {name: StoredTensor(shape, kept) for name, shape in entry.parts.items()}
    return tensors


def _source_files(tensors: dict[str, StoredTensor], assets: Path | None) -> dict[str, str]:
    """The file of each tensor in the folder that `assets` are of, if it had an index of them."""
    if assets is None or not (assets / INDEX).is_file():
        return {}
    weight_map: dict[str, str] = read_json(assets / INDEX).get("weight_map", {})
    known = set(tensors) <= set(weight_map)
    return {name: weight_map[name] for name in tensors} if known else {}


def _unfinished(path: Path) -> Path:
    """The name of a file while it is written: no reader takes it for weights."""
    return path.with_name(path.name + ".part")


def _say_what_is_lost(names: NameMap, reader: PartsReader) -> None:
    """Balancing biases that Hugging Face's class has no place for change the choice of experts."""
    exported = {each.name for each in names.entries if each.parts}
    biases = [name for name in reader.tensors if name.endswith(_BIAS) and name not in exported]
    largest = max((reader.read(name).abs().max().item() for name in biases), default=0.0)
    if largest:
        logger.warning(
            f"{len(biases)} balancing biases ({biases[0]}, ...; up to {largest:.1e}) are left out: "
            "Hugging Face's class has no place for them, so some tokens will go to other experts"
        )


def _write_index(
    out: Path, file_of: dict[str, str], tensors: dict[str, StoredTensor], assets: Path | None
) -> None:
    """The index, byte for byte the source's if it is of the same tensors and files."""
    total = sum(each.num_bytes for each in tensors.values())
    if assets is not None and (assets / INDEX).is_file():
        source = read_json(assets / INDEX)
        same_total = source.get("metadata", {}).get("total_size") == total
        if source.get("weight_map") == file_of and same_total:
            shutil.copyfile(assets / INDEX, out / INDEX)
            return
    write_index(out, file_of, total)
