"""What makes a compiled kernel unfit, one line per fault."""

from kernel_check.chips import Chip
from kernel_check.compile import Measured

# An innermost loop with more ordinary multiply-adds than this computes a product without tensor
# cores: element-wise work (a sigmoid, a score) takes a few per element that a thread holds, and is
# not in a loop of its own.
MAX_SCALAR_PRODUCTS = 64


def faults(
    measured: Measured, chip: Chip, *, needs_tensor_cores: bool, specializes_warps: bool = False
) -> list[str]:
    """Empty for a kernel that is fit."""
    if measured.error:
        return [f"does not compile: {measured.error}"]
    found = []
    if measured.spilled_bytes:
        found.append(
            f"spills: {measured.spilled_bytes} bytes per thread go to local memory "
            f"({measured.registers} registers, {measured.stack_bytes} bytes of stack); "
            "use a smaller tile or more warps"
        )
    if measured.shared_bytes > chip.shared_bytes:
        found.append(
            f"needs {measured.shared_bytes} bytes of shared memory; {chip.arch} has "
            f"{chip.shared_bytes} for a block; use fewer stages or a smaller tile"
        )
    if measured.tensor_memory_columns > chip.tensor_memory_columns:
        found.append(
            f"needs {measured.tensor_memory_columns} columns of tensor memory; {chip.arch} has "
            f"{chip.tensor_memory_columns}"
        )
    if specializes_warps and not measured.specializes_warps:
        found.append(
            "has WARP_SPECIALIZE, and the compiler gave no warps a part of their own; leave it out"
        )
    if needs_tensor_cores:
        found += _without_tensor_cores(measured, chip)
    return found


def _without_tensor_cores(measured: Measured, chip: Chip) -> list[str]:
    if measured.num_tensor_core == 0:
        instead = ", ".join(measured.tensor_core_names) or "none at all"
        return [
            f"has no {chip.tensor_core_name} in a loop (tensor-core instructions: {instead}); "
            "the main loop does not use the tensor cores as it could"
        ]
    if measured.num_scalar_products > MAX_SCALAR_PRODUCTS:
        return [
            f"has a loop of {measured.num_scalar_products} ordinary multiply-adds and no "
            f"{chip.tensor_core_name}; one of its products does not use the tensor cores"
        ]
    return []
