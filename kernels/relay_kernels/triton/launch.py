"""One launch of a kernel: its arguments and configuration, to run here or to compile elsewhere.

Tensors may be on the meta device: a launch can be described where it cannot run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from relay_kernels.activation import SwiGLU
from relay_kernels.choice import is_interpreted
from relay_kernels.rows import Chunk
from relay_kernels.tuning import TunedConfig, arch_of, shape_class, tuned_config

# The interpreter runs one program after another; two show that programs share the tiles rightly.
_INTERPRETED_PROGRAMS = 2
_ALIGNMENT = 16  # bytes, which a descriptor's rows begin at multiples of


@dataclass(frozen=True)
class Launch:
    """``arguments`` (tensors, None, numbers) and constants, by name."""

    function: Any
    arguments: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    config: TunedConfig

    def run(self, grid: tuple[int, ...]) -> None:
        self.function[grid](
            **self.arguments,
            **self.constexprs,
            **self.config.constexprs,
            num_warps=self.config.num_warps,
            num_stages=self.config.num_stages,
        )


def described_arguments(
    operands: Mapping[str, tuple[torch.Tensor, tuple[str, str]]], config: TunedConfig
) -> tuple[dict[str, Any], TunedConfig]:
    """Operands as the kernel takes them, and the configuration that says how: ``DESCRIPTORS``.

    With descriptors the copy engine fetches tiles, and no thread computes their addresses: of the
    last two dimensions as large as the block sizes named, of experts one. That takes rows that
    adjoin within and begin at multiples of 16 bytes; other views go by pointers. Without
    descriptors there is nothing to give to warps of their own: ``WARP_SPECIALIZE``.
    """
    wanted = bool(config.constexprs.get("DESCRIPTORS", False))
    uses = wanted and all(_is_describable(tensor) for tensor, _ in operands.values())
    specializes = uses and bool(config.constexprs.get("WARP_SPECIALIZE", False))
    how = {"DESCRIPTORS": uses, "WARP_SPECIALIZE": specializes}
    config = replace(config, constexprs={**config.constexprs, **how})
    arguments: dict[str, Any] = {}
    for name, (tensor, block) in operands.items():
        tile = [1] * (tensor.dim() - 2) + [int(config.constexprs[size]) for size in block]
        arguments[name] = TensorDescriptor.from_tensor(tensor, tile) if uses else tensor
    return arguments, config


def _is_describable(tensor: torch.Tensor) -> bool:
    *outer, innermost = tensor.stride()
    if innermost != 1 or tensor.data_ptr() % _ALIGNMENT or tensor.numel() == 0:
        return False
    return all(stride * tensor.element_size() % _ALIGNMENT == 0 for stride in outer)


def config_for(
    kernel: str, chunk: Chunk, dim: int, expert_dim: int, operand: torch.Tensor
) -> TunedConfig:
    """The tuned configuration of a kernel for this chunk of this layer on this device."""
    of_class = shape_class(chunk.rows_per_expert, dim, expert_dim, operand.dtype)
    return tuned_config(kernel, arch_of(operand.device), of_class, operand.dtype)


def narrow_config(kernel: str, device: torch.device, dtype: torch.dtype) -> TunedConfig:
    """That of a kernel whose configuration does not depend on the layer's shape."""
    return tuned_config(kernel, arch_of(device), "narrow", dtype)


def num_programs(chunk: Chunk, width: int, config: TunedConfig, device: torch.device) -> int:
    """Persistent programs for the tiles of a chunk's rows and ``width`` columns."""
    return persistent_programs(most_tiles(chunk, width, config), config, device)


def most_tiles(chunk: Chunk, width: int, config: TunedConfig) -> int:
    """How many tiles a chunk's rows and ``width`` columns have at most.

    How many there are is known on the device alone; at most one more row tile for each expert than
    for rows of one.
    """
    block_m, block_n = config.constexprs["BLOCK_M"], config.constexprs["BLOCK_N"]
    num_row_tiles = cdiv(chunk.num_rows, block_m) + min(chunk.num_experts, chunk.num_rows) - 1
    return num_row_tiles * cdiv(width, block_n)


def persistent_programs(num_tiles: int, config: TunedConfig, device: torch.device) -> int:
    """Programs that share at most ``num_tiles`` tiles."""
    most = _INTERPRETED_PROGRAMS
    if not is_interpreted():
        most = torch.cuda.get_device_properties(device).multi_processor_count
    return min(most * config.programs_per_processor, num_tiles)


def chunk_arguments(chunk: Chunk) -> dict[str, Any]:
    """The arguments by which kernels know a chunk."""
    rows_N = chunk.tokens.rows_N
    for indices in (rows_N, chunk.offsets_G):
        assert indices.is_contiguous(), "row numbers and bounds are read one after another"
    return {
        "rows_ptr": rows_N,
        "offsets_ptr": chunk.offsets_G,
        "first": chunk.first,
        "last": chunk.last,
        "num_experts": chunk.num_experts,
    }


def activation_constexprs(activation: SwiGLU) -> dict[str, Any]:
    return {
        "ALPHA": activation.alpha,
        "LIMIT": activation.limit if activation.is_clamped else None,
        "UP_OFFSET": activation.up_offset,
    }


def strides(prefix: str, dims: str, tensor: torch.Tensor | None) -> dict[str, int]:
    """``{prefix + dim: stride}``; zeros for a tensor that is not there."""
    if tensor is not None and tensor.shape[-1] * tensor.stride(-1) >= 2**31:
        raise ValueError(
            f"an operand of shape {tuple(tensor.shape)} has strides {tensor.stride()}: its last "
            "dimension spans 2^31 elements or more; pass a contiguous copy"
        )
    values = (0,) * len(dims) if tensor is None else tensor.stride()
    return {f"{prefix}{dim}": value for dim, value in zip(dims, values, strict=True)}


def input_precision(dtype: torch.dtype) -> str:
    """How float32 operands are multiplied: as the user set it for all matrix products."""
    if dtype != torch.float32:
        return "ieee"
    precision = torch.get_float32_matmul_precision()
    return {"highest": "ieee", "high": "tf32x3", "medium": "tf32"}[precision]


def cdiv(number: int, by: int) -> int:
    return -(-number // by)


def power_of_2(number: int) -> int:
    """The least power of 2 that is not less."""
    return 1 << max(0, number - 1).bit_length()
