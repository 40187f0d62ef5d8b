"""Launches of the forward kernels: from an op's tensors to a kernel's arguments and grid.

Shape legend: T tokens, K top-k, N = T * K routed rows, R rows of the chunk, D model dimension, F
expert hidden dimension, g experts.
"""

from collections.abc import Iterator

import torch

from relay_kernels.activation import SwiGLU
from relay_kernels.chunk import Chunk
from relay_kernels.triton.example_layers import ExampleLayer
from relay_kernels.triton.forward import down_kernel, up_gate_kernel
from relay_kernels.triton.launch import (
    Launch,
    activation_constexprs,
    cdiv,
    chunk_arguments,
    config_for,
    described_arguments,
    input_precision,
    num_programs,
    power_of_2,
    strides,
)
from relay_kernels.triton.registry import KernelVariant
from relay_kernels.triton.sum_rows import sum_rows_kernel
from relay_kernels.tuning import TunedConfig, arch_of, tuned_config


def up_gate(
    a_RF: torch.Tensor,
    x_TD: torch.Tensor,
    chunk: Chunk,
    w1_gFD: torch.Tensor,
    w3_gFD: torch.Tensor,
    b1_gF: torch.Tensor | None,
    b3_gF: torch.Tensor | None,
    activation: SwiGLU,
) -> None:
    _, expert_dim, dim = w1_gFD.shape
    config = config_for("up_gate", chunk, dim, expert_dim, x_TD)
    launch = up_gate_launch(
        a_RF, x_TD, chunk, w1_gFD, w3_gFD, b1_gF, b3_gF, activation, config
    )  # fmt: skip
    launch.run((num_programs(chunk, expert_dim, config, x_TD.device),))


def down(
    into: torch.Tensor,
    positions_N: torch.Tensor | None,
    a_RF: torch.Tensor,
    scores_N: torch.Tensor,
    chunk: Chunk,
    w2_gDF: torch.Tensor,
    b2_gD: torch.Tensor | None,
) -> None:
    """Sum into ``into`` (T x D), or with positions write it (R x D)."""
    _, dim, expert_dim = w2_gDF.shape
    config = config_for("down", chunk, dim, expert_dim, a_RF)
    launch = down_launch(into, positions_N, a_RF, scores_N, chunk, w2_gDF, b2_gD, config)
    launch.run((num_programs(chunk, dim, config, a_RF.device),))


def sum_rows(
    out_TD: torch.Tensor, y_RD: torch.Tensor, positions_N: torch.Tensor, chunk: Chunk
) -> None:
    config = tuned_config("sum_rows", arch_of(y_RD.device), "narrow", y_RD.dtype)
    num_tokens, dim = out_TD.shape
    block_m, block_n = config.constexprs["BLOCK_M"], config.constexprs["BLOCK_N"]
    grid = (cdiv(num_tokens, block_m), cdiv(dim, block_n))
    sum_rows_launch(out_TD, y_RD, positions_N, chunk, config).run(grid)


def up_gate_launch(
    a_RF: torch.Tensor,
    x_TD: torch.Tensor,
    chunk: Chunk,
    w1_gFD: torch.Tensor,
    w3_gFD: torch.Tensor,
    b1_gF: torch.Tensor | None,
    b3_gF: torch.Tensor | None,
    activation: SwiGLU,
    config: TunedConfig,
) -> Launch:
    assert a_RF.stride(1) == 1
    expert_dim, dim = w1_gFD.shape[1:]
    block = ("BLOCK_N", "BLOCK_K")
    weights, config = described_arguments(
        {"w1_ptr": (w1_gFD, block), "w3_ptr": (w3_gFD, block)}, config
    )
    return Launch(
        up_gate_kernel,
        {
            "a_ptr": a_RF,
            "x_ptr": x_TD,
            **weights,
            "b1_ptr": b1_gF,
            "b3_ptr": b3_gF,
            **chunk_arguments(chunk),
            "dim": dim,
            "expert_dim": expert_dim,
            "stride_ar": a_RF.stride(0),
            **strides("stride_x", "td", x_TD),
            **strides("stride_w1", "efd", w1_gFD),
            **strides("stride_w3", "efd", w3_gFD),
            **strides("stride_b1", "ef", b1_gF),
            **strides("stride_b3", "ef", b3_gF),
        },
        {
            "TOP_K": chunk.top_k,
            **activation_constexprs(activation),
            "INPUT_PRECISION": input_precision(x_TD.dtype),
            "EXPERTS": power_of_2(chunk.num_experts),
            "EVEN_K": dim % config.constexprs["BLOCK_K"] == 0,
        },
        config,
    )


def down_launch(
    into: torch.Tensor,
    positions_N: torch.Tensor | None,
    a_RF: torch.Tensor,
    scores_N: torch.Tensor,
    chunk: Chunk,
    w2_gDF: torch.Tensor,
    b2_gD: torch.Tensor | None,
    config: TunedConfig,
) -> Launch:
    assert a_RF.stride(1) == 1
    assert into.stride(1) == 1
    assert scores_N.is_contiguous()
    dim, expert_dim = w2_gDF.shape[1:]
    operands, config = described_arguments(
        {"a_ptr": (a_RF, ("BLOCK_M", "BLOCK_K")), "w2_ptr": (w2_gDF, ("BLOCK_N", "BLOCK_K"))},
        config,
    )
    return Launch(
        down_kernel,
        {
            "out_ptr": into,
            "positions_ptr": positions_N,
            **operands,
            "scores_ptr": scores_N,
            "b2_ptr": b2_gD,
            **chunk_arguments(chunk),
            "dim": dim,
            "expert_dim": expert_dim,
            "stride_out": into.stride(0),
            "stride_ar": a_RF.stride(0),
            **strides("stride_w2", "edf", w2_gDF),
            **strides("stride_b2", "ed", b2_gD),
        },
        {
            "TOP_K": chunk.top_k,
            "SCATTERS": positions_N is None,
            "INPUT_PRECISION": input_precision(a_RF.dtype),
            "EXPERTS": power_of_2(chunk.num_experts),
            "EVEN_K": expert_dim % config.constexprs["BLOCK_K"] == 0,
        },
        config,
    )


def sum_rows_launch(
    out_TD: torch.Tensor,
    y_RD: torch.Tensor,
    positions_N: torch.Tensor,
    chunk: Chunk,
    config: TunedConfig,
) -> Launch:
    assert out_TD.stride(1) == 1
    assert y_RD.stride(1) == 1
    assert positions_N.is_contiguous()
    return Launch(
        sum_rows_kernel,
        {
            "out_ptr": out_TD,
            "y_ptr": y_RD,
            "rows_ptr": chunk.rows_N,
            "positions_ptr": positions_N,
            "first": chunk.first,
            "last": chunk.last,
            "num_tokens": out_TD.shape[0],
            "dim": out_TD.shape[1],
            "stride_out": out_TD.stride(0),
            "stride_yr": y_RD.stride(0),
        },
        {"TOP_K": chunk.top_k},
        config,
    )


def variants(layer: ExampleLayer, arch: str, dtype: torch.dtype) -> Iterator[KernelVariant]:
    """The forward kernels as this layer launches them on ``arch``."""
    chunk = layer.chunk()
    of_class = layer.shape_class(dtype)
    x_TD, a_RF, y_RD = layer.tokens(dtype), layer.hidden(dtype), layer.rows(dtype)
    scores_N, positions_N = layer.scores(), layer.positions()
    weights, activation = layer.weights(dtype), layer.activation()
    w1_gFD, w2_gDF, w3_gFD = weights.w1_gFD, weights.w2_gDF, weights.w3_gFD
    suffix = f"{layer.name}/{dtype}".replace("torch.", "")
    multiplies = dtype != torch.float32  # float32 products are exact, in no tensor core

    config = tuned_config("up_gate", arch, of_class, dtype)
    launch = up_gate_launch(
        a_RF, x_TD, chunk, w1_gFD, w3_gFD, weights.b1_gF, weights.b3_gF, activation, config
    )  # fmt: skip
    yield launch.variant(f"up_gate/{suffix}", needs_tensor_cores=multiplies)
    config = tuned_config("down", arch, of_class, dtype)
    for name, into, positions in (
        ("down_scatter", x_TD, None),
        ("down_rows", y_RD, positions_N),
    ):
        launch = down_launch(into, positions, a_RF, scores_N, chunk, w2_gDF, weights.b2_gD, config)
        yield launch.variant(f"{name}/{suffix}", needs_tensor_cores=multiplies)
    config = tuned_config("sum_rows", arch, "narrow", dtype)
    launch = sum_rows_launch(x_TD, y_RD, positions_N, chunk, config)
    yield launch.variant(f"sum_rows/{suffix}", needs_tensor_cores=False)
