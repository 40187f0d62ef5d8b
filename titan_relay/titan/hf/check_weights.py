"""Does a Hugging Face folder have exactly a model's tensors, in the model's shapes?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torchtitan.tools.logging import logger

from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.hf.folder import HfFolder
from titan_relay.titan.hf.names import HEAD, NameMap

_SHOWN = 20
_TIED_HINT = "; if it is the embedding, set tie_word_embeddings = true in config.json and [model]"
# Tensors that some folders carry and no model needs: rotary frequencies, which follow from theta.
_DERIVED = re.compile(r".*rotary_emb\.inv_freq")


def refuse_faults(
    path: Path, faults: Mapping[str, list[str]], left_out: Iterable[str] = ()
) -> None:
    """Log names of tensors by kind, what is left out on purpose too; long lists are cut.

    Raises:
        HfError: there are faults; one line with how many of each kind, and the first.
    """
    for kind, names in {**faults, "left out": list(left_out)}.items():
        if not names:
            continue
        logger.info(f"{len(names)} {kind}:")
        for name in names[:_SHOWN]:
            logger.info(f"  {name}")
        if len(names) > _SHOWN:
            logger.info(f"  ... and {len(names) - _SHOWN} more")
    summary = [f"{len(each)} {kind} ({each[0]})" for kind, each in faults.items() if each]
    if summary:
        raise HfError(f"{path} does not have the model's tensors: {', '.join(summary)}")


def check_weights(
    names: NameMap, folder: HfFolder, *, mtp_layers: Iterable[int] = (), skip: str = ""
) -> None:
    """Refuse other names or shapes, and what is no floating-point number of 16 bits or more.

    Args:
        mtp_layers: indices of layers that only predict further tokens and are not trained here.
        skip: a regular expression of names to leave out although the model lacks them.

    Raises:
        HfError: as `refuse_faults`.
    """
    expected: Mapping[str, tuple[int, ...]] = names.hf_shapes
    mtp = {str(each) for each in mtp_layers}
    try:
        skipped = re.compile(skip) if skip else None
    except re.error as error:
        raise HfError(f"--skip {skip!r} is no regular expression: {error}") from error

    def left_out(name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return bool(
            _DERIVED.fullmatch(name)
            or (layer and layer[1] in mtp)
            or (skipped and skipped.search(name))
        )

    present = folder.places
    extra = sorted(set(present) - set(expected))
    twice = names.tied_head
    if twice is None or not set(twice) <= set(present) or left_out(twice[0]):
        twice = None
    elif present[twice[0]].shape == present[twice[1]].shape:
        extra.remove(twice[0])
    common = [name for name in expected if name in present]
    faults = {
        "missing": [name + _TIED_HINT * (name == HEAD) for name in expected if name not in present],
        "unexpected": [name for name in extra if not left_out(name)],
        "of another shape": [
            f"{name}: {list(present[name].shape)}, the model's is {list(expected[name])}"
            for name in common
            if present[name].shape != expected[name]
        ],
        "of no floating-point type": [
            name
            for name in common
            if not present[name].dtype.is_floating_point or present[name].dtype.itemsize == 1
        ],
    }
    refuse_faults(folder.path, faults, filter(left_out, extra))
    if twice is not None:
        _refuse_another_head(folder, *twice)


def _refuse_another_head(folder: HfFolder, head: str, embedding: str) -> None:
    """A tied model's head may be stored a second time, if it is the embedding, bit for bit."""
    pairs = zip(folder.pieces(head), folder.pieces(embedding), strict=True)
    difference = max((_largest_difference(*each) for each in pairs), default=0.0)
    if difference:
        raise HfError(
            f"{folder.path}: {head} differs from {embedding} by up to {difference:.1e}, and "
            "tie_word_embeddings = true makes them one; set it to false in config.json and in "
            "[model], or leave the head out of the folder"
        )
    logger.info(f"{head} is {embedding}, stored twice; read once")


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        return 0.0
    found = (one.double() - other.double()).abs().max().item()
    return found if math.isfinite(found) else math.inf
