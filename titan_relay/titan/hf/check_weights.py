"""Does a Hugging Face folder have exactly a model's tensors, in the model's shapes?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchtitan.tools.logging import logger

from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.hf.folder import HfFolder
from titan_relay.titan.hf.names import NameMap

_SHOWN = 20
# Tensors that some folders carry and no model needs: rotary frequencies, which follow from theta.
_DERIVED = re.compile(r".*rotary_emb\.inv_freq")


@dataclass(frozen=True)
class WeightCheck:
    """What is wrong with a folder's tensors, and which are left out on purpose.

    missing, unexpected, left_out: names. shapes: name, the folder's shape, the model's.
    not_float: names of tensors that are no floating-point numbers of 16 bits or more.
    """

    missing: list[str]
    unexpected: list[str]
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    not_float: list[str]
    left_out: list[str]

    @property
    def ok(self) -> bool:
        """Whether the folder can be loaded."""
        return not (self.missing or self.unexpected or self.shapes or self.not_float)

    def log(self) -> None:
        """Log every fault by kind; long lists are cut and counted."""
        log_lists(
            {
                "missing": self.missing,
                "unexpected": self.unexpected,
                "of another shape": [
                    f"{name}: {list(theirs)} here, {list(ours)} in the model"
                    for name, theirs, ours in self.shapes
                ],
                "not of a floating-point type": self.not_float,
                "left out": self.left_out,
            }
        )

    def summary(self) -> str:
        """The faults as one line: how many of each kind, and the first."""
        parts = []
        if self.missing:
            parts.append(f"{len(self.missing)} missing ({self.missing[0]})")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} unexpected ({self.unexpected[0]})")
        if self.shapes:
            name, theirs, ours = self.shapes[0]
            parts.append(
                f"{len(self.shapes)} of another shape ({name}: {list(theirs)}, the model's is "
                f"{list(ours)})"
            )
        if self.not_float:
            parts.append(f"{len(self.not_float)} of no floating-point type ({self.not_float[0]})")
        return ", ".join(parts)


def log_lists(lists: Mapping[str, list[str]]) -> None:
    """Log what is in each of the lists that are not empty, a name a line."""
    for kind, names in lists.items():
        if not names:
            continue
        logger.info(f"{len(names)} {kind}:")
        for name in names[:_SHOWN]:
            logger.info(f"  {name}")
        if len(names) > _SHOWN:
            logger.info(f"  ... and {len(names) - _SHOWN} more")


def check_weights(
    names: NameMap, folder: HfFolder, *, mtp_layers: Iterable[int] = (), skip: str = ""
) -> WeightCheck:
    """Compare names, shapes and types.

    Args:
        mtp_layers: indices of layers that only predict further tokens and are not trained here.
        skip: a regular expression of names to leave out although the model lacks them.
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
    common = [name for name in expected if name in present]
    return WeightCheck(
        missing=[name for name in expected if name not in present],
        unexpected=[name for name in extra if not left_out(name)],
        shapes=[
            (name, present[name].shape, expected[name])
            for name in common
            if present[name].shape != expected[name]
        ],
        not_float=[
            name
            for name in common
            if not present[name].dtype.is_floating_point or present[name].dtype.itemsize == 1
        ],
        left_out=[name for name in extra if left_out(name)],
    )
