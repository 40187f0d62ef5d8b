"""A chunked loss of few chunks in the place of one of many, for a dry run.

All chunks of a chunked loss are alike, and there may be thousands. The first makes the head's
gradient, the second adds to it, and the last has it summed over ranks: these three run. Those
between do nothing: the memory that one of them needs is what the second needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtitan.components.loss import ChunkedLossWrapper, GradAccumulator

_RUN_AT_FIRST = 2


@contextmanager
def few_chunks() -> Iterator[None]:
    """Skip the middle chunks of every chunked loss inside."""
    original: Any = ChunkedLossWrapper.__call__

    def call(loss: Any, *args: Any, **kwargs: Any) -> Any:
        with _skipping(loss):
            return original(loss, *args, **kwargs)

    ChunkedLossWrapper.__call__ = call
    try:
        yield
    finally:
        ChunkedLossWrapper.__call__ = original


@contextmanager
def _skipping(loss: Any) -> Iterator[None]:
    head, inner, last = loss.lm_head, loss.loss_fn, loss.num_chunks - 1
    project, accumulate = head._compiled_call_impl, GradAccumulator.add
    chunk = -1

    def skip() -> bool:
        return _RUN_AT_FIRST <= chunk < last

    def call(h_BLD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal chunk
        chunk += 1
        return _Skipped(h_BLD) if skip() else head._call_impl(h_BLD, *args, **kwargs)

    # What torch.compile sets for a module to be called in another way, hooks and all.
    head._compiled_call_impl = call
    loss.loss_fn = lambda logits, *args, **kwargs: (
        (logits, {}) if skip() else inner(logits, *args, **kwargs)
    )
    GradAccumulator.add = _unless(skip, accumulate)
    try:
        yield
    finally:
        head._compiled_call_impl, loss.loss_fn, GradAccumulator.add = project, inner, accumulate


def _unless(skip: Callable[[], bool], accumulate: Any) -> Any:
    def add(accumulator: GradAccumulator, h_grad_BLD: torch.Tensor) -> None:
        if not skip():
            accumulate(accumulator, h_grad_BLD)

    return add


class _Skipped:
    """Logits and loss of a chunk that is left out."""

    def __init__(self, h_BLD: torch.Tensor):
        self._h_BLD = h_BLD

    def detach(self) -> int:
        """Adds nothing to the loss."""
        return 0

    def backward(self) -> None:
        """Show a gradient of the right size, which takes no memory."""
        self._h_BLD.grad = self._h_BLD.detach()
