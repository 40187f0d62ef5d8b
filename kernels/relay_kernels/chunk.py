"""The rows that one call of an op works on."""

import itertools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """Rows ``first <= i < last`` of ``rows_N``, which may be of several experts.

    Attributes:
        rows_N: row numbers ``t * top_k + k`` in order of expert, int32 or int64. Only those of the
            chunk are read.
        offsets_G: g + 1 bounds within ``rows_N``: expert ``j`` of the g at hand has the rows
            ``offsets_G[j] <= i < offsets_G[j + 1]``. On the device; nothing here copies it.
        first, last: of the chunk, within the bounds.
        rows_per_expert: how many an expert has on average. Tuning alone depends on it.
    """

    rows_N: torch.Tensor
    offsets_G: torch.Tensor
    first: int
    last: int
    top_k: int
    rows_per_expert: int

    @property
    def num_rows(self) -> int:
        return self.last - self.first

    @property
    def num_experts(self) -> int:
        return self.offsets_G.shape[0] - 1

    def segments(self) -> list[tuple[int, int, int]]:
        """``(expert, start, end)`` for each expert with rows here, on the host (synchronises)."""
        bounds = [min(max(bound, self.first), self.last) for bound in self.offsets_G.tolist()]
        pairs = enumerate(itertools.pairwise(bounds))
        return [(expert, start, end) for expert, (start, end) in pairs if start < end]
