"""Where each routed copy of a token goes: rows sorted by expert, and how many each expert gets.

A routed copy (a row) is numbered ``t * K + k``. Example with K = 2, E = 3 and ids
``[[2, 0], [0, 1]]``: sorted by expert the rows are ``[1, 2, 3, 0]`` and the counts ``[2, 1, 1]``.
The sort is stable, so the rows of one expert are in order of token.

Shape legend: T tokens, K top-k, N = T * K rows, E experts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# After the E counts come the first row with an id out of range, or -1, and that id.
NUM_FAULT_FIELDS = 2
NO_FAULT = -1


@dataclass(frozen=True)
class RoutingPlan:
    """Rows on the device, segment bounds on the host."""

    rows_N: torch.Tensor
    bounds: Sequence[int]

    def segments(self, first_expert: int, last_expert: int) -> list[tuple[int, int]]:
        """The rows of experts ``first_expert <= j < last_expert``, as ``(start, end)``."""
        inner = self.bounds[first_expert : last_expert + 1]
        return list(itertools.pairwise(inner))


def sort_rows(expert_ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort rows by expert.

    Returns:
        rows_N: int32 row numbers in order of expert, on the ids' device.
        counts: int64 on the host, the counts of the E experts and then the fault fields. The one
            device-to-host copy of a layer; nothing raises here, because a rank that raised alone
            would leave the others waiting.
    """
    ids_N = expert_ids_TK.reshape(-1).to(torch.int32)
    sorted_N, rows_N = torch.sort(ids_N, stable=True)
    edges = torch.arange(num_experts + 1, dtype=torch.int32, device=ids_N.device)
    bounds = torch.searchsorted(sorted_N, edges)
    bounds_host = bounds.cpu()
    fault_row, fault_id = NO_FAULT, 0
    if bounds_host[0] > 0 or bounds_host[-1] < ids_N.numel():
        outside_N = (ids_N < 0) | (ids_N >= num_experts)
        fault_row = int(outside_N.nonzero()[0])
        fault_id = int(ids_N[fault_row])
    fault = torch.tensor([fault_row, fault_id], dtype=torch.int64)
    return rows_N.to(torch.int32), torch.cat([bounds_host.diff(), fault])


def plan_from_counts(rows_N: torch.Tensor, counts: torch.Tensor) -> RoutingPlan:
    """The plan of ``sort_rows``'s results."""
    bounds = [0]
    for count in counts.tolist()[:-NUM_FAULT_FIELDS]:
        bounds.append(bounds[-1] + count)
    return RoutingPlan(rows_N, bounds)


def fault_of(counts: torch.Tensor) -> tuple[int, int]:
    """``(row, id)`` of the first id out of range; the row is ``NO_FAULT`` when there is none."""
    row, expert_id = counts.tolist()[-NUM_FAULT_FIELDS:]
    return row, expert_id
