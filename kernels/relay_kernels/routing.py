"""Rows in order of expert, and where each expert's begin, all on the device.

A row is a routed copy ``t * K + k``. Example with K = 2, E = 3 and ids ``[[2, 0], [0, 1]]``: the
rows in order of expert are ``[1, 2, 3, 0]`` and the bounds ``[0, 2, 3, 4]``. Rows of one expert
ascend.

Tokens may be cut into S slices of ``slice_length``; bounds then tell an expert's slices apart, too:
its rows ascend, so those of one slice adjoin. Bounds are in order of ``expert * S + slice``.

Shape legend: T tokens, K top-k, N = T * K rows, E experts, S slices, C = E * S counts.
"""

import torch
from torch import Tensor

from relay_kernels.choice import uses_triton


def route_rows(
    expert_ids_TK: Tensor, num_experts: int, num_slices: int, slice_length: int, kernels: str
) -> tuple[Tensor, Tensor]:
    """``rows_N`` and ``bounds_C`` (C + 1 of them), int32, on the ids' device.

    An id out of range is not an error here. ``bounds[0] > 0`` or ``bounds[C] < N`` shows one, and
    such rows lie outside the bounds.
    """
    # float32 stands for "any that the kernels know": ids have no such dtype.
    if uses_triton(kernels, expert_ids_TK.device, torch.float32):
        from relay_kernels.triton import launch_routing

        return launch_routing.counting_sort(expert_ids_TK, num_experts, num_slices, slice_length)
    return _sorted_rows(expert_ids_TK, num_experts, num_slices, slice_length)


def _sorted_rows(
    expert_ids_TK: Tensor, num_experts: int, num_slices: int, slice_length: int
) -> tuple[Tensor, Tensor]:
    """By PyTorch's stable sort."""
    # Clamped in their own dtype: an id out of range stays one in int32, also times num_slices.
    ids_N = expert_ids_TK.reshape(-1).clamp(-1, num_experts).to(torch.int32)
    keys_N, rows_N = torch.sort(ids_N, stable=True)
    rows_N = rows_N.to(torch.int32)
    if num_slices > 1:
        # Within an expert rows ascend, hence slices do: the combined key is sorted.
        rows_per_slice = expert_ids_TK.shape[1] * slice_length
        slice_N = torch.div(rows_N, rows_per_slice, rounding_mode="floor")
        keys_N = keys_N.mul_(num_slices).add_(slice_N)
    num_keys = num_experts * num_slices
    edges = torch.arange(num_keys + 1, dtype=torch.int32, device=ids_N.device)
    return rows_N, torch.searchsorted(keys_N, edges).to(torch.int32)
