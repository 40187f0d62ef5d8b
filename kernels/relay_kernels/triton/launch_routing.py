"""Launches of the routing kernels.

Shape legend: N = T * K rows, C = E * S keys, B blocks of rows.
"""

from collections.abc import Iterator

import torch

from relay_kernels.triton.example_layers import ExampleLayer
from relay_kernels.triton.launch import Launch, cdiv, power_of_2
from relay_kernels.triton.registry import KernelVariant
from relay_kernels.triton.routing import count_keys_kernel, place_rows_kernel
from relay_kernels.tuning import TunedConfig, arch_of, tuned_config


def route_rows(
    expert_ids_TK: torch.Tensor, num_experts: int, num_slices: int, slice_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``ops_routing.route_rows`` by the kernels."""
    device, num_keys = expert_ids_TK.device, num_experts * num_slices
    config = tuned_config("route", arch_of(device), "narrow", torch.int32)
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
    _launch(count_keys_kernel, {"counts_ptr": counts_BC}, ids_N, sizes, config).run((num_blocks,))
    totals_C = counts_BC.sum(0, dtype=torch.int32)
    ends_C = totals_C.cumsum(0, dtype=torch.int32)
    bounds_C[1:] = ends_C[:num_keys]
    # Where a key begins, and after it what earlier blocks have of it.
    begins_BC = counts_BC.cumsum(0, dtype=torch.int32).sub_(counts_BC).add_(ends_C - totals_C)
    places = {"rows_ptr": rows_N, "begins_ptr": begins_BC}
    _launch(place_rows_kernel, places, ids_N, sizes, config).run((num_blocks,))
    return rows_N, bounds_C


def _launch(
    kernel: object,
    tensors: dict[str, torch.Tensor],
    ids_N: torch.Tensor,
    sizes: tuple[int, int, int],
    config: TunedConfig,
) -> Launch:
    num_experts, num_slices, rows_per_slice = sizes
    return Launch(
        kernel,
        {
            **tensors,
            "ids_ptr": ids_N,
            "num_rows": ids_N.numel(),
            "num_experts": num_experts,
            "rows_per_slice": rows_per_slice,
        },
        {"SLICES": num_slices, "KEYS": power_of_2(num_experts * num_slices + 1)},
        config,
    )


def variants(layer: ExampleLayer, arch: str, dtype: torch.dtype) -> Iterator[KernelVariant]:
    """The routing kernels; nothing in them depends on ``dtype``."""
    config = tuned_config("route", arch, "narrow", torch.int32)
    ids_N = torch.empty(layer.num_rows, dtype=torch.int64, device="meta")
    begins = torch.empty(1, dtype=torch.int32, device="meta")
    for num_slices in (1, 2):
        sizes = (layer.num_experts, num_slices, layer.num_rows // num_slices)
        for name, kernel, tensors in (
            ("count_keys", count_keys_kernel, {"counts_ptr": begins}),
            ("place_rows", place_rows_kernel, {"rows_ptr": begins, "begins_ptr": begins}),
        ):
            launch = _launch(kernel, tensors, ids_N, sizes, config)
            label = f"{name}/{layer.name}/{num_slices} slices"
            yield launch.variant(label, needs_tensor_cores=False)
