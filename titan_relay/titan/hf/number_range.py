"""Casts that must not lose a weight: what the narrower type cannot hold is refused by name, not
written as infinity."""

from __future__ import annotations

import math

import torch
from torchtitan.tools.logging import logger

from titan_relay.titan.hf.errors import HfError


class RangeError(HfError):
    """A weight is beyond the type that it is to be written in."""


def narrows(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a finite number of `source` may be infinite in `target`."""
    return torch.finfo(target).max < torch.finfo(source).max


def overflow(value: torch.Tensor, dtype: torch.dtype) -> float | None:
    """The largest magnitude of `value` if it is finite there and infinite in `dtype`."""
    if not narrows(value.dtype, dtype) or not value.numel():
        return None
    largest = _largest(value)
    if not math.isfinite(largest):
        largest = _largest(value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    rounded = torch.tensor(largest, dtype=value.dtype).to(dtype)
    return largest if rounded.isinf() else None


def out_of_range(name: str, largest: float, dtype: torch.dtype) -> str:
    """The refusal, in words."""
    return (
        f"{name} has values up to {largest:.6g}, and "
        f"{str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:.6g}"
    )


def _largest(value: torch.Tensor) -> float:
    """Largest magnitude; NaN if one is there. No copy of `value`."""
    low, high = value.aminmax()
    return max(-low.item(), high.item()) if math.isfinite(low.item()) else math.inf


class Cast:
    """Casts the tensors of one conversion, and tells in the end which were infinite before."""

    def __init__(self) -> None:
        self._not_finite: dict[str, None] = {}

    def __call__(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`value` in `dtype`.

        Raises:
            RangeError: it has a finite value that `dtype` has not.
        """
        largest = overflow(value, dtype)
        if largest is not None:
            raise RangeError(
                f"{out_of_range(name, largest, dtype)}; choose a wider --dtype, such as float32"
            )
        if value.numel() and not math.isfinite(_largest(value)):
            self._not_finite[name] = None
        return value.to(dtype)

    def log(self) -> None:
        """Say which tensors have had infinite values or NaN, which are written as they are."""
        if self._not_finite:
            first = next(iter(self._not_finite))
            logger.warning(
                f"{len(self._not_finite)} tensors ({first}, ...) have infinite values or NaN, "
                "written as they are: no run can start from them"
            )
