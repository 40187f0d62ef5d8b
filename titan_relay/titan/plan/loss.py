"""A chunked loss of few chunks in the place of one of many, for a dry run.

All chunks of a chunked loss are alike, and there may be hundreds. The first makes the head's
gradient, the second adds to it, and the last has it summed over ranks: these three run. Those
between give their hidden states a gradient of the right size, and neither logits nor loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtitan.components.loss import ChunkedLossWrapper

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
    project = head.forward
    chunk = -1

    def forward(h_BLD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal chunk
        chunk += 1
        if _RUN_AT_FIRST <= chunk < last:
            return h_BLD[..., :1]
        return project(h_BLD, *args, **kwargs)

    def loss_of(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _RUN_AT_FIRST <= chunk < last:
            return logits.float().sum(), {}
        return inner(logits, *args, **kwargs)

    head.forward, loss.loss_fn = forward, loss_of
    try:
        yield
    finally:
        loss.loss_fn = inner
        del head.forward  # the class's own again
