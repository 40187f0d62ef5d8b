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
from relay_kernels.tuning import TunedConfig, shape_class, tuned_config
from relay_kernels.weights import ExpertWeights

# The interpreter runs one program after another; two show that programs share the tiles rightly.
_INTERPRETED_PROGRAMS = 2
_ALIGNMENT = 16  # bytes, which a descriptor's rows begin at multiples of


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments (tensors, None, numbers) and constants by name, and its programs.

    Of ``values`` the kernel takes those that it has a parameter for. ``grid`` has a program for
    each tile that there may be; if ``is_persistent``, as many as the device runs share them.
    """

    function: Any
    values: Mapping[str, Any]
    config: TunedConfig
    grid: tuple[int, ...]
    is_persistent: bool = False

    def run(self, device: torch.device) -> None:
        grid = self.grid
        if self.is_persistent:
            grid = (min(_programs_at_a_time(device) * self.config.programs_per_processor, *grid),)
        values = self.values
        self.function[grid](
            **{name: values[name] for name in self.function.arg_names if name in values},
            **self.config.constexprs,
            num_warps=self.config.num_warps,
            num_stages=self.config.num_stages,
        )


def _programs_at_a_time(device: torch.device) -> int:
    if is_interpreted():
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


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


def config_for(kernel: str, chunk: Chunk, weights: ExpertWeights, arch: str) -> TunedConfig:
    """The tuned configuration of a kernel for this chunk; ``weights``, or their gradients."""
    expert_dim, dim = weights.w1_gFD.shape[1:]
    dtype = chunk.tokens.x_TD.dtype
    of_class = shape_class(chunk.rows_per_expert, dim, expert_dim, dtype)
    return tuned_config(kernel, arch, of_class, dtype)


def narrow_config(kernel: str, dtype: torch.dtype, arch: str) -> TunedConfig:
    """That of a kernel whose configuration does not depend on the layer's shape."""
    return tuned_config(kernel, arch, "narrow", dtype)


def most_tiles(chunk: Chunk, width: int, config: TunedConfig) -> tuple[int]:
    """How many tiles a chunk's rows and ``width`` columns have at most.

    How many there are is known on the device alone; at most one more row tile for each expert than
    for rows of one.
    """
    block_m, block_n = config.constexprs["BLOCK_M"], config.constexprs["BLOCK_N"]
    num_row_tiles = cdiv(chunk.num_rows, block_m) + min(chunk.num_experts, chunk.num_rows) - 1
    return (num_row_tiles * cdiv(width, block_n),)


def chunk_values(chunk: Chunk) -> dict[str, Any]:
    """By what kernels know a chunk and its tokens."""
    tokens = chunk.tokens
    for indices in (tokens.rows_N, chunk.offsets_G):
        assert indices.is_contiguous(), "row numbers and bounds are read one after another"
    return {
        "rows_ptr": tokens.rows_N,
        "offsets_ptr": chunk.offsets_G,
        "first": chunk.first,
        "last": chunk.last,
        "num_experts": chunk.num_experts,
        "scores_ptr": tokens.scores_N,
        **operand("x", "td", tokens.x_TD),
        "TOP_K": tokens.top_k,
        "EXPERTS": power_of_2(chunk.num_experts),
        "INPUT_PRECISION": input_precision(tokens.x_TD.dtype),
    }


def layer_values(chunk: Chunk, weights: ExpertWeights) -> dict[str, Any]:
    """And their experts."""
    expert_dim, dim = weights.w1_gFD.shape[1:]
    return {
        **chunk_values(chunk),
        "dim": dim,
        "expert_dim": expert_dim,
        **operand("w1", "efd", weights.w1_gFD),
        **operand("w2", "edf", weights.w2_gDF),
        **operand("w3", "efd", weights.w3_gFD),
        **operand("b1", "ef", weights.b1_gF),
        **operand("b2", "ed", weights.b2_gD),
        **operand("b3", "ef", weights.b3_gF),
    }


def activation_constexprs(activation: SwiGLU) -> dict[str, Any]:
    return {
        "ALPHA": activation.alpha,
        "LIMIT": activation.limit if activation.is_clamped else None,
        "UP_OFFSET": activation.up_offset,
    }


def even_sizes(config: TunedConfig, **sizes: int) -> dict[str, bool]:
    """``EVEN_K`` and the like: whether tiles divide a size, so that none reaches past its end."""
    blocks = config.constexprs
    return {f"EVEN_{name}": size % blocks[f"BLOCK_{name}"] == 0 for name, size in sizes.items()}


def operand(name: str, dims: str, tensor: torch.Tensor | None) -> dict[str, Any]:
    """A tensor and its strides (zeros where it is not there): ``x_ptr, stride_x_t, stride_x_d``."""
    if tensor is not None and tensor.shape[-1] * tensor.stride(-1) >= 2**31:
        raise ValueError(
            f"an operand of shape {tuple(tensor.shape)} has strides {tensor.stride()}: its last "
            "dimension spans 2^31 elements or more; pass a contiguous copy"
        )
    values = (0,) * len(dims) if tensor is None else tensor.stride()
    strides = {f"stride_{name}_{dim}": value for dim, value in zip(dims, values, strict=True)}
    return {f"{name}_ptr": tensor, **strides}


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
