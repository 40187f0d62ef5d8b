"""Metrics that every rank has its own value of: gathered together, in one collective a kind.

Every function here is collective: all ranks call it, at the same point, with the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.distributed as dist

from titan_relay.titan.device import on_cpu
from titan_relay.titan.metrics.folder_lock import FolderError

Reduction = Literal["max", "sum", "mean"]
Curves = Callable[[], Mapping[str, float]]


def over_ranks(values: Mapping[str, float], reduction: Reduction) -> dict[str, float]:
    """Reduce each value over all ranks; without a process group the values as they are."""
    if not values or not dist.is_initialized():
        return dict(values)
    keys = sorted(values)
    device = "cpu" if on_cpu() else torch.accelerator.current_accelerator()
    table = torch.tensor([values[key] for key in keys], dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
    if reduction == "mean":
        table /= dist.get_world_size()
    return dict(zip(keys, table.tolist(), strict=True))


def raise_together(message: str | None) -> None:
    """Raise `FolderError` on every rank, with the message of the lowest that has one, if any has:
    others would wait for one alone."""
    messages = [message]
    if dist.is_initialized():
        messages *= dist.get_world_size()
        dist.all_gather_object(messages, message)
    for text in messages:
        if text is not None:
            raise FolderError(text)
