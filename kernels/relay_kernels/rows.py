"""Tokens at hand and their routed rows: all of a group of experts', or a chunk of them.

A row is a routed copy of a token, numbered ``t * K + k``. Rows are sorted by expert; those of one
expert ascend, and an expert has a token once at most.

Shape legend: T tokens, K top-k, N = T * K routed rows, D model dimension, g experts held together.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

# Rows ``start <= i < end`` of the sorted rows belong to one expert.
Segment = tuple[int, int]


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens, and which of their rows go to which expert.

    Attributes:
        x_TD: any floating dtype, any strides.
        scores_TK: the weight of each choice, any floating dtype.
        rows_N: int32 or int64 row numbers in order of expert. Those outside the segments are not
            read.
        segments: one per expert, in order and adjoining; empty ones are ordinary.
    """

    x_TD: torch.Tensor
    scores_TK: torch.Tensor
    rows_N: torch.Tensor
    segments: Sequence[Segment]

    @property
    def top_k(self) -> int:
        return self.scores_TK.shape[1]

    @cached_property
    def scores_N(self) -> torch.Tensor:
        """By row number; a copy only where ``scores_TK`` is not contiguous."""
        return self.scores_TK.reshape(-1)

    @property
    def bounds(self) -> tuple[int, int]:
        """The first row of all segments, and the end of the last."""
        return self.segments[0][0], self.segments[-1][1]

    def of_experts(self, first: int, last: int) -> "RoutedTokens":
        """The same tokens with the rows of experts ``first <= j < last`` alone."""
        return RoutedTokens(self.x_TD, self.scores_TK, self.rows_N, self.segments[first:last])


@dataclass(frozen=True)
class Chunk:
    """The rows ``first <= i < last`` of some tokens, which one launch of a kernel works on.

    Attributes:
        offsets_G: g + 1 bounds within ``rows_N``: expert ``j`` of the g at hand has the rows
            ``offsets_G[j] <= i < offsets_G[j + 1]``. On the device; nothing here copies it.
        first, last: within the bounds, and not equal.
        rows_per_expert: how many an expert has on average. Tuning alone depends on it.
    """

    tokens: RoutedTokens
    offsets_G: torch.Tensor
    first: int
    last: int
    rows_per_expert: int

    @property
    def num_rows(self) -> int:
        return self.last - self.first

    @property
    def num_experts(self) -> int:
        return self.offsets_G.shape[0] - 1


def chunks(tokens: RoutedTokens, max_rows: int, rows_per_expert: int) -> Iterator[Chunk]:
    """The rows of all segments in chunks of at most ``max_rows``; none where there are no rows."""
    offsets_G = _device_offsets(tokens.segments, tokens.x_TD.device)
    start, end = tokens.bounds
    for first in range(start, end, max_rows):
        yield Chunk(tokens, offsets_G, first, min(first + max_rows, end), rows_per_expert)


def _device_offsets(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """The g + 1 bounds of adjoining segments, on the device, without waiting for it."""
    assert all(left[1] == right[0] for left, right in itertools.pairwise(segments))
    bounds = [segments[0][0], *(end for _, end in segments)]
    offsets_G = torch.tensor(bounds, dtype=torch.int32, pin_memory=device.type == "cuda")
    return offsets_G.to(device, non_blocking=True)
