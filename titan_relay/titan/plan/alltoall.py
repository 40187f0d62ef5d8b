"""What the all-to-all makes of a layer's tokens: the rows that it brings a rank.

Skew says how uneven that is: rows that a rank receives, as a multiple of what it would under
balanced routing. `math.inf` stands for the worst case: every token of every rank chooses as many of
its experts as it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config.override import derive, override
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


def worst_rows(num_rows: int, num_ranks: int, top_k: int, num_local: int) -> int:
    """Rows that reach one rank's experts at most, if every rank sends `num_rows`.

    Example: 64 rows of top-8 on 4 ranks with 2 experts each: each of the 4 * 8 tokens brings 2
    rows, 64. With 16 experts each: 4 * 64.
    """
    return num_ranks * (num_rows // top_k) * min(top_k, num_local)


class SuppliedSplits(AllToAllTokenDispatcher):
    """torchtitan's all-to-all, whose splits follow from the skew instead of from routing counts."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        skew: float = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._skew = config.skew
        self._num_rows = 0

    def _local_reorder(self, *tensors: torch.Tensor) -> Any:
        self._num_rows = tensors[2].numel()
        return super()._local_reorder(*tensors)

    def _sync_token_count_exchange(
        self, counts_E: torch.Tensor, counts_We: torch.Tensor, num_ranks: int
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        counts_E, *_ = super()._sync_token_count_exchange(counts_E, counts_We, num_ranks)
        num_local = counts_E.shape[0] // num_ranks
        worst = worst_rows(self._num_rows, num_ranks, self.top_k, num_local)
        received = int(min(self._skew * self._num_rows, worst))
        sent = shared_evenly(self._num_rows, num_ranks)
        return counts_E, sent, shared_evenly(received, num_ranks)


@override(target=AllToAllTokenDispatcher.Config, description="an all-to-all of a given skew")
def supplied_splits(
    config: AllToAllTokenDispatcher.Config, *, skew: float
) -> SuppliedSplits.Config:
    """Replace every all-to-all."""
    return derive(config, SuppliedSplits.Config, skew=skew)


def shared_evenly(total: int, num_parts: int) -> list[int]:
    """`total` in parts that differ by 1 at most."""
    base, extra = divmod(total, num_parts)
    return [base + (index < extra) for index in range(num_parts)]
