"""A chunked loss of few chunks in the place of one of many, for a dry run.

All chunks of a chunked loss are alike, and there may be thousands. The first makes the head's
gradient, the second adds to it, and the last has it summed over ranks: these three run. Those
between compute nothing: the memory that one of them needs is what the second needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.loss import ChunkedLossWrapper

from titan_relay.private_torch import called_as

_RUN_AT_FIRST = 2


class FewChunks(ChunkedLossWrapper):
    """torchtitan's chunked loss, without head and loss of the middle chunks."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        pass

    loss_fn: Any

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._loss_of_chunk = self.loss_fn
        self.loss_fn = self._unless_skipped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, wrong by the chunks that are left out, and its metrics."""
        with called_as(self.lm_head, self._for_some_chunks):
            return super().__call__(*args, **kwargs)

    def _for_some_chunks(self, head: Callable[..., Any]) -> Callable[..., Any]:
        numbers = itertools.count()

        def call(h_BLD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_skipped = _RUN_AT_FIRST <= next(numbers) < self.num_chunks - 1
            return _Skipped(h_BLD) if is_skipped else head(h_BLD, *args, **kwargs)

        return call

    def _unless_skipped(self, logits: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(logits, _Skipped):
            return logits, {}
        return self._loss_of_chunk(logits, *args, **kwargs)


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
