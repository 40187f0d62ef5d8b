"""What the all-to-all makes of a layer's tokens: rows that it brings a rank, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


@dataclass(frozen=True)
class RoutedLayer:
    """One mixture-of-experts layer on one rank.

    num_tokens: tokens of this rank. num_ranks: of expert parallelism. itemsize: bytes per element.
    """

    num_tokens: int
    top_k: int
    dim: int
    expert_dim: int
    num_experts: int
    num_ranks: int
    itemsize: int

    @property
    def balanced_rows(self) -> int:
        """Rows that reach this rank's experts from a balanced router."""
        return self.num_tokens * self.top_k

    @property
    def worst_rows(self) -> int:
        """Rows that reach them if all ranks' tokens choose this rank's experts first."""
        num_local = self.num_experts // self.num_ranks
        return self.num_ranks * self.num_tokens * min(self.top_k, num_local)

    def dispatched_bytes(self, num_rows: int) -> int:
        """The rows themselves, as the experts' input."""
        return num_rows * self.dim * self.itemsize

    def intermediate_bytes(self, num_rows: int) -> int:
        """Both up-projections of SwiGLU and their product."""
        return 3 * num_rows * self.expert_dim * self.itemsize


@dataclass(frozen=True)
class Routing:
    """The load of the rank that is looked at.

    skew: rows that this rank receives, as a multiple of what it would under balanced routing.
    Math.inf stands for the worst case: every token of every rank chooses as many of its experts
    as it can.
    """

    skew: float = 1.0

    def received_rows(self, num_rows: int, num_ranks: int, top_k: int, num_local: int) -> int:
        """Rows that reach this rank, if every rank sends `num_rows`.

        Example: 64 rows of top-8 on 4 ranks with 2 experts each: 64 balanced; at worst each of
        the 4 * 8 tokens brings 2 rows, 64 too. With 16 experts each: 4 * 64.
        """
        layer = RoutedLayer(num_rows // top_k, top_k, 0, 0, num_local * num_ranks, num_ranks, 0)
        worst = layer.worst_rows
        return worst if self.skew * num_rows >= worst else int(self.skew * num_rows)

    @contextmanager
    def supplied(self) -> Iterator[None]:
        """Have torchtitan's all-to-all take its splits from here."""
        dispatcher_class: Any = AllToAllTokenDispatcher
        reorder = dispatcher_class._local_reorder
        read_splits = dispatcher_class._sync_token_count_exchange

        def reorder_and_count(dispatcher: Any, *tensors: torch.Tensor) -> Any:
            dispatcher.planned_rows = tensors[2].numel()
            return reorder(dispatcher, *tensors)

        def splits(
            dispatcher: Any, counts_E: torch.Tensor, counts_We: torch.Tensor, num_ranks: int
        ) -> tuple[torch.Tensor, list[int], list[int]]:
            num_rows, num_local = dispatcher.planned_rows, counts_E.shape[0] // num_ranks
            received = self.received_rows(num_rows, num_ranks, dispatcher.top_k, num_local)
            counts_We = torch.ops._c10d_functional.wait_tensor(counts_We)
            return counts_We.reshape(-1), _even(num_rows, num_ranks), _even(received, num_ranks)

        dispatcher_class._local_reorder = reorder_and_count
        dispatcher_class._sync_token_count_exchange = splits
        try:
            yield
        finally:
            dispatcher_class._local_reorder = reorder
            dispatcher_class._sync_token_count_exchange = read_splits


def rows_per_expert(num_rows: int, counts_E: torch.Tensor) -> list[int]:
    """`num_rows` shared evenly among the experts, in the place of counts read from a device."""
    return _even(num_rows, counts_E.shape[0])


def _even(total: int, num_parts: int) -> list[int]:
    base, extra = divmod(total, num_parts)
    return [base + (index < extra) for index in range(num_parts)]
