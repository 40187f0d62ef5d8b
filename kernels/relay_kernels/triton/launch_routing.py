"""Launches of the routing kernels.

Shape legend: N = T * K rows, C = E * S keys, B blocks of rows.
"""

from collections.abc import Mapping

import torch

from relay_kernels.triton.launch import Launch, cdiv, narrow_config, power_of_2
from relay_kernels.triton.routing import count_keys_kernel, place_rows_kernel
from relay_kernels.tuning import TunedConfig, arch_of

Sizes = tuple[int, int, int]  # experts, slices, rows of a slice


def counting_sort(
    expert_ids_TK: torch.Tensor, num_experts: int, num_slices: int, slice_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``routing.route_rows`` by the kernels."""
    device, num_keys = expert_ids_TK.device, num_experts * num_slices
    config = narrow_config("route", torch.int32, arch_of(device))
    ids_N = expert_ids_TK.reshape(-1)
    num_blocks = cdiv(ids_N.numel(), config.constexprs["BLOCK_M"])
    shape = (num_blocks, power_of_2(num_keys + 1))
    counts_BC = torch.empty(shape, dtype=torch.int32, device=device)
    rows_N = torch.empty(ids_N.numel(), dtype=torch.int32, device=device)
    bounds_C = torch.zeros(num_keys + 1, dtype=torch.int32, device=device)
    if num_blocks == 0:
        return rows_N, bounds_C
    # One slice may say any length.
    rows_per_slice = expert_ids_TK.shape[1] * slice_length if num_slices > 1 else ids_N.numel()
    sizes = (num_experts, num_slices, rows_per_slice)
    counts = {"counts_ptr": counts_BC}
    routing_launch(count_keys_kernel, counts, ids_N, sizes, config).run(device)
    totals_C = counts_BC.sum(0, dtype=torch.int32)
    ends_C = totals_C.cumsum(0, dtype=torch.int32)
    bounds_C[1:] = ends_C[:num_keys]
    # Where a key begins, and after it what earlier blocks have of it.
    begins_BC = counts_BC.cumsum(0, dtype=torch.int32).sub_(counts_BC).add_(ends_C - totals_C)
    places = {"rows_ptr": rows_N, "begins_ptr": begins_BC}
    routing_launch(place_rows_kernel, places, ids_N, sizes, config).run(device)
    return rows_N, bounds_C


def routing_launch(
    kernel: object,
    tensors: Mapping[str, torch.Tensor],
    ids_N: torch.Tensor,
    sizes: Sizes,
    config: TunedConfig,
) -> Launch:
    """Of either kernel; ``tensors`` are those that the other has not, by their arguments' names."""
    num_experts, num_slices, rows_per_slice = sizes
    values = {
        **tensors,
        "ids_ptr": ids_N,
        "num_rows": ids_N.numel(),
        "num_experts": num_experts,
        "rows_per_slice": rows_per_slice,
        "SLICES": num_slices,
        "KEYS": power_of_2(num_experts * num_slices + 1),
    }
    return Launch(kernel, values, config, (cdiv(ids_N.numel(), config.constexprs["BLOCK_M"]),))
