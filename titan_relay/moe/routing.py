"""Where each routed copy of a token goes: rows sorted by expert, and how many each expert gets.

A routed copy (a row) is numbered ``t * K + k``. Example with K = 2, E = 3 and ids
``[[2, 0], [0, 1]]``: sorted by expert the rows are ``[1, 2, 3, 0]`` and the counts ``[2, 1, 1]``.
The sort is stable, so the rows of one expert are in order of token. Counts are kept per slice of
the tokens as well, because a ring of tokens passes one slice at a time.

Shape legend: T tokens, K top-k, N = T * K rows, E experts, S slices of the tokens, W ranks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relay_kernels import RoutedTokens, Segment, route_rows

# After the S * E counts come the first row with an id out of range, or -1, and that id.
NUM_FAULT_FIELDS = 2
NO_FAULT = -1


@dataclass(frozen=True)
class TokenSlices:
    """Tokens cut into slices of ``length``; slice ``s`` begins at token ``s * length``."""

    num: int
    length: int


def sort_rows(
    expert_ids_TK: torch.Tensor, num_experts: int, slices: TokenSlices, kernels: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort rows by expert.

    Returns:
        rows_N: int32 row numbers in order of expert, on the ids' device.
        counts: int64 on the host, S * E counts (slice-major) and then the fault fields. The one
            device-to-host copy of a layer; nothing raises here, because a rank that raised alone
            would leave the others waiting.
    """
    rows_N, bounds = route_rows(expert_ids_TK, num_experts, slices.num, slices.length, kernels)
    bounds = bounds.cpu()
    counts_SE = bounds.diff().view(num_experts, slices.num).t().to(torch.int64)
    fault = _first_fault(expert_ids_TK.reshape(-1), num_experts, bounds)
    return rows_N, torch.cat([counts_SE.reshape(-1), torch.tensor(fault, dtype=torch.int64)])


def _first_fault(ids_N: torch.Tensor, num_experts: int, bounds: torch.Tensor) -> list[int]:
    if bounds[0] == 0 and bounds[-1] == ids_N.numel():
        return [NO_FAULT, 0]
    outside_N = (ids_N < 0) | (ids_N >= num_experts)
    row = int(outside_N.nonzero()[0])
    return [row, int(ids_N[row])]


def fault_of(counts: torch.Tensor) -> tuple[int, int]:
    """``(row, id)`` of the first id out of range; the row is ``NO_FAULT`` when there is none."""
    row, expert_id = counts.tolist()[-NUM_FAULT_FIELDS:]
    return row, expert_id


def routed_tokens(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    rows_N: torch.Tensor,
    counts: torch.Tensor,
    num_experts: int,
) -> RoutedTokens:
    """This rank's tokens with the rows of every expert, from the results of ``sort_rows``."""
    counts_SE = counts_matrix(counts, num_experts)
    totals_E = [sum(of_slices) for of_slices in zip(*counts_SE, strict=True)]
    bounds = [0, *itertools.accumulate(totals_E)]
    return RoutedTokens(x_TD, scores_TK, rows_N, segments(bounds, 0, num_experts))


def counts_matrix(counts: torch.Tensor, num_experts: int) -> list[list[int]]:
    """The S x E counts of ``sort_rows``'s second result."""
    return counts[:-NUM_FAULT_FIELDS].view(-1, num_experts).tolist()


def segments(bounds: Sequence[int], first_expert: int, last_expert: int) -> list[Segment]:
    """``(start, end)`` of the rows of experts ``first_expert <= j < last_expert``."""
    return list(itertools.pairwise(bounds[first_expert : last_expert + 1]))


def rows_by_slice(rows_N: torch.Tensor, top_k: int, slices: TokenSlices) -> torch.Tensor:
    """The rows in order of slice, then expert, each numbered from its slice's first token.

    Example: K = 2, slices of one token, ids ``[[2, 0], [0, 1]]``. The rows by expert are
    ``[1, 2, 3, 0]``; slice 0 has ``[1, 0]`` and slice 1 has ``[2, 3]``, numbered ``[0, 1]``.
    """
    if slices.num == 1:
        return rows_N
    rows_per_slice = top_k * slices.length
    dtype = torch.int16 if slices.num <= 2**15 else torch.int32
    slice_N = torch.div(rows_N, rows_per_slice, rounding_mode="floor").to(dtype)
    order_N = torch.sort(slice_N, stable=True).indices
    return rows_N[order_N].remainder_(rows_per_slice)
