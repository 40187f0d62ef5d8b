"""Launches of the backward kernels: from an op's tensors to a kernel's arguments and grid.

Shape legend: T tokens, K top-k, N = T * K routed rows, R rows of the chunk, D model dimension, F
expert hidden dimension, g experts, C column tiles of F.
"""

from collections.abc import Iterator

import torch

from relay_kernels.activation import SwiGLU
from relay_kernels.chunk import Chunk
from relay_kernels.triton.backward_hidden import hidden_backward_kernel, score_gradients_kernel
from relay_kernels.triton.backward_products import (
    bias_gradient_kernel,
    dx_kernel,
    weight_gradient_kernel,
)
from relay_kernels.triton.example_layers import ExampleLayer
from relay_kernels.triton.launch import (
    Launch,
    activation_constexprs,
    cdiv,
    chunk_arguments,
    config_for,
    described_arguments,
    input_precision,
    most_tiles,
    num_programs,
    persistent_programs,
    power_of_2,
    strides,
)
from relay_kernels.triton.registry import KernelVariant
from relay_kernels.tuning import TunedConfig, arch_of, tuned_config
from relay_kernels.weights import ExpertWeights


def hidden_backward(
    dh1_RF: torch.Tensor | None,
    dh3_RF: torch.Tensor | None,
    a_RF: torch.Tensor | None,
    dscores_N: torch.Tensor | None,
    x_TD: torch.Tensor,
    dout_TD: torch.Tensor,
    scores_N: torch.Tensor,
    chunk: Chunk,
    weights: ExpertWeights,
    activation: SwiGLU,
) -> None:
    """Allocates ``4 * C`` bytes per row when score gradients are asked for."""
    expert_dim, dim = weights.w1_gFD.shape[1:]
    config = config_for("hidden_backward", chunk, dim, expert_dim, x_TD)
    parts_CR = None
    if dscores_N is not None:
        num_parts = cdiv(expert_dim, config.constexprs["BLOCK_N"])
        parts_CR = x_TD.new_empty((num_parts, chunk.num_rows), dtype=torch.float32)
    launch = hidden_backward_launch(
        dh1_RF, dh3_RF, a_RF, parts_CR, x_TD, dout_TD, scores_N, chunk, weights, activation, config
    )
    launch.run((most_tiles(chunk, expert_dim, config),))
    if dscores_N is not None and parts_CR is not None:
        config = tuned_config("score_gradients", arch_of(x_TD.device), "narrow", x_TD.dtype)
        launch = score_gradients_launch(dscores_N, parts_CR, dout_TD, chunk, weights.b2_gD, config)
        launch.run((num_programs(chunk, 1, config, x_TD.device),))


def dx(
    into: torch.Tensor,
    positions_N: torch.Tensor | None,
    dh1_RF: torch.Tensor,
    dh3_RF: torch.Tensor,
    chunk: Chunk,
    w1_gFD: torch.Tensor,
    w3_gFD: torch.Tensor,
) -> None:
    """Sum into ``into`` (T x D), or with positions write it (R x D)."""
    expert_dim, dim = w1_gFD.shape[1:]
    config = config_for("dx", chunk, dim, expert_dim, dh1_RF)
    launch = dx_launch(into, positions_N, dh1_RF, dh3_RF, chunk, w1_gFD, w3_gFD, config)
    launch.run((most_tiles(chunk, dim, config),))


def weight_gradients(
    into: ExpertWeights,
    dh1_RF: torch.Tensor,
    dh3_RF: torch.Tensor,
    a_RF: torch.Tensor,
    x_TD: torch.Tensor,
    dout_TD: torch.Tensor,
    scores_N: torch.Tensor,
    chunk: Chunk,
    accumulates: bool,
) -> None:
    expert_dim, dim = into.w1_gFD.shape[1:]
    config = config_for("dw13", chunk, dim, expert_dim, x_TD)
    launch = dw13_launch(into, dh1_RF, dh3_RF, x_TD, chunk, accumulates, config)
    launch.run((_num_weight_programs(launch, chunk, x_TD.device),))
    config = config_for("dw2", chunk, dim, expert_dim, x_TD)
    launch = dw2_launch(into, dout_TD, a_RF, chunk, accumulates, config)
    launch.run((_num_weight_programs(launch, chunk, x_TD.device),))
    config = tuned_config("bias_gradient", arch_of(x_TD.device), "narrow", x_TD.dtype)
    for db_gX, values, scores in _bias_sums(into, dh1_RF, dh3_RF, dout_TD, scores_N):
        launch = bias_gradient_launch(db_gX, values, scores, chunk, accumulates, config)
        num_tiles = chunk.num_experts * cdiv(db_gX.shape[1], config.constexprs["BLOCK_N"])
        launch.run((persistent_programs(num_tiles, config, x_TD.device),))


def hidden_backward_launch(
    dh1_RF: torch.Tensor | None,
    dh3_RF: torch.Tensor | None,
    a_RF: torch.Tensor | None,
    parts_CR: torch.Tensor | None,
    x_TD: torch.Tensor,
    dout_TD: torch.Tensor,
    scores_N: torch.Tensor,
    chunk: Chunk,
    weights: ExpertWeights,
    activation: SwiGLU,
    config: TunedConfig,
) -> Launch:
    expert_dim, dim = weights.w1_gFD.shape[1:]
    row_strides = {tensor.stride() for tensor in (dh1_RF, dh3_RF, a_RF) if tensor is not None}
    assert len(row_strides) <= 1, "dh1, dh3 and a must have equal strides"
    stride_r, stride_f = row_strides.pop() if row_strides else (expert_dim, 1)
    assert stride_f == 1
    assert stride_r * config.constexprs["BLOCK_M"] < 2**31, "a tile's offsets take 32 bits"
    assert (dh1_RF is None) == (dh3_RF is None)
    assert scores_N.is_contiguous()
    return Launch(
        hidden_backward_kernel,
        {
            "dh1_ptr": dh1_RF,
            "dh3_ptr": dh3_RF,
            "a_ptr": a_RF,
            "parts_ptr": parts_CR,
            "x_ptr": x_TD,
            "dout_ptr": dout_TD,
            "scores_ptr": scores_N,
            "w1_ptr": weights.w1_gFD,
            "w3_ptr": weights.w3_gFD,
            "w2_ptr": weights.w2_gDF,
            "b1_ptr": weights.b1_gF,
            "b3_ptr": weights.b3_gF,
            **chunk_arguments(chunk),
            "dim": dim,
            "expert_dim": expert_dim,
            "stride_r": stride_r,
            "stride_parts": 0 if parts_CR is None else parts_CR.stride(0),
            **strides("stride_x", "td", x_TD),
            **strides("stride_g", "td", dout_TD),
            **strides("stride_w1", "efd", weights.w1_gFD),
            **strides("stride_w3", "efd", weights.w3_gFD),
            **strides("stride_w2", "edf", weights.w2_gDF),
            **strides("stride_b1", "ef", weights.b1_gF),
            **strides("stride_b3", "ef", weights.b3_gF),
        },
        {
            "TOP_K": chunk.top_k,
            **activation_constexprs(activation),
            "INPUT_PRECISION": input_precision(x_TD.dtype),
            "EXPERTS": power_of_2(chunk.num_experts),
            "EVEN_N": expert_dim % config.constexprs["BLOCK_N"] == 0,
            "EVEN_K": dim % config.constexprs["BLOCK_K"] == 0,
        },
        config,
    )


def score_gradients_launch(
    dscores_N: torch.Tensor,
    parts_CR: torch.Tensor,
    dout_TD: torch.Tensor,
    chunk: Chunk,
    b2_gD: torch.Tensor | None,
    config: TunedConfig,
) -> Launch:
    assert dscores_N.is_contiguous()
    return Launch(
        score_gradients_kernel,
        {
            "dscores_ptr": dscores_N,
            "parts_ptr": parts_CR,
            "dout_ptr": dout_TD,
            "b2_ptr": b2_gD,
            **chunk_arguments(chunk),
            "num_parts": parts_CR.shape[0],
            "dim": dout_TD.shape[1],
            "stride_parts": parts_CR.stride(0),
            **strides("stride_g", "td", dout_TD),
            **strides("stride_b2", "ed", b2_gD),
        },
        {"TOP_K": chunk.top_k, "EXPERTS": power_of_2(chunk.num_experts)},
        config,
    )


def dx_launch(
    into: torch.Tensor,
    positions_N: torch.Tensor | None,
    dh1_RF: torch.Tensor,
    dh3_RF: torch.Tensor,
    chunk: Chunk,
    w1_gFD: torch.Tensor,
    w3_gFD: torch.Tensor,
    config: TunedConfig,
) -> Launch:
    assert dh1_RF.stride() == dh3_RF.stride()
    assert dh1_RF.stride(1) == 1
    expert_dim, dim = w1_gFD.shape[1:]
    rows_block, weights_block = ("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")
    operands, config = described_arguments(
        {
            "dh1_ptr": (dh1_RF, rows_block),
            "dh3_ptr": (dh3_RF, rows_block),
            "w1_ptr": (w1_gFD, weights_block),
            "w3_ptr": (w3_gFD, weights_block),
        },
        config,
    )
    return Launch(
        dx_kernel,
        {
            "dx_ptr": into,
            "positions_ptr": positions_N,
            **operands,
            **chunk_arguments(chunk),
            "dim": dim,
            "expert_dim": expert_dim,
            **strides("stride_dx", "td", into),
            "stride_r": dh1_RF.stride(0),
            **strides("stride_w1", "efd", w1_gFD),
            **strides("stride_w3", "efd", w3_gFD),
        },
        {
            "TOP_K": chunk.top_k,
            "SCATTERS": positions_N is None,
            "INPUT_PRECISION": input_precision(dh1_RF.dtype),
            "EXPERTS": power_of_2(chunk.num_experts),
            "EVEN_N": dim % config.constexprs["BLOCK_N"] == 0,
            "EVEN_K": expert_dim % config.constexprs["BLOCK_K"] == 0,
        },
        config,
    )


def dw13_launch(
    into: ExpertWeights,
    dh1_RF: torch.Tensor,
    dh3_RF: torch.Tensor,
    x_TD: torch.Tensor,
    chunk: Chunk,
    accumulates: bool,
    config: TunedConfig,
) -> Launch:
    """W1's and W3's gradients, which share x."""
    assert dh1_RF.stride() == dh3_RF.stride()
    outputs = (into.w1_gFD, into.w3_gFD)
    lefts = (dh1_RF, dh3_RF)
    return _weight_launch(outputs, lefts, x_TD, False, chunk, accumulates, config)


def dw2_launch(
    into: ExpertWeights,
    dout_TD: torch.Tensor,
    a_RF: torch.Tensor,
    chunk: Chunk,
    accumulates: bool,
    config: TunedConfig,
) -> Launch:
    outputs = (into.w2_gDF, None)
    return _weight_launch(outputs, (dout_TD, None), a_RF, True, chunk, accumulates, config)


def _weight_launch(
    outputs: tuple[torch.Tensor, torch.Tensor | None],
    lefts: tuple[torch.Tensor, torch.Tensor | None],
    right: torch.Tensor,
    gathers_left: bool,
    chunk: Chunk,
    accumulates: bool,
    config: TunedConfig,
) -> Launch:
    num_left, num_right = outputs[0].shape[1:]
    return Launch(
        weight_gradient_kernel,
        {
            "dw_ptr": outputs[0],
            "dw_b_ptr": outputs[1],
            "left_ptr": lefts[0],
            "left_b_ptr": lefts[1],
            "right_ptr": right,
            **chunk_arguments(chunk),
            "num_left": num_left,
            "num_right": num_right,
            **strides("stride_dw_", "emn", outputs[0]),
            **strides("stride_dw_b_", "emn", outputs[1]),
            **strides("stride_left_", "rm", lefts[0]),
            **strides("stride_right_", "rn", right),
        },
        {
            "TOP_K": chunk.top_k,
            "GATHERS_LEFT": gathers_left,
            "ACCUMULATES": accumulates,
            "INPUT_PRECISION": input_precision(right.dtype),
            "EXPERTS": power_of_2(chunk.num_experts),
            "EVEN_M": num_left % config.constexprs["BLOCK_M"] == 0,
            "EVEN_N": num_right % config.constexprs["BLOCK_N"] == 0,
        },
        config,
    )


def bias_gradient_launch(
    db_gX: torch.Tensor,
    values: torch.Tensor,
    scores_N: torch.Tensor | None,
    chunk: Chunk,
    accumulates: bool,
    config: TunedConfig,
) -> Launch:
    return Launch(
        bias_gradient_kernel,
        {
            "db_ptr": db_gX,
            "values_ptr": values,
            "scores_ptr": scores_N,
            **chunk_arguments(chunk),
            "num_values": db_gX.shape[1],
            **strides("stride_db_", "en", db_gX),
            **strides("stride_values_", "rn", values),
        },
        {
            "TOP_K": chunk.top_k,
            "ACCUMULATES": accumulates,
            "EXPERTS": power_of_2(chunk.num_experts),
        },
        config,
    )


def _bias_sums(
    into: ExpertWeights,
    dh1_RF: torch.Tensor,
    dh3_RF: torch.Tensor,
    dout_TD: torch.Tensor,
    scores_N: torch.Tensor,
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Where to sum, what, and by which scores if it is not scaled yet; empty without biases."""
    if into.b1_gF is None or into.b2_gD is None or into.b3_gF is None:
        return []
    return [
        (into.b1_gF, dh1_RF, None),
        (into.b2_gD, dout_TD, scores_N),
        (into.b3_gF, dh3_RF, None),
    ]


def _num_weight_programs(launch: Launch, chunk: Chunk, device: torch.device) -> int:
    height, width = launch.arguments["num_left"], launch.arguments["num_right"]
    blocks = launch.config.constexprs
    num_tiles = cdiv(height, blocks["BLOCK_M"]) * cdiv(width, blocks["BLOCK_N"])
    return persistent_programs(chunk.num_experts * num_tiles, launch.config, device)


def variants(layer: ExampleLayer, arch: str, dtype: torch.dtype) -> Iterator[KernelVariant]:
    """The backward kernels as this layer launches them on ``arch``."""
    chunk, of_class = layer.chunk(), layer.shape_class(dtype)
    x_TD, hidden_RF, y_RD = layer.tokens(dtype), layer.hidden(dtype), layer.rows(dtype)
    scores_N, positions_N = layer.scores(), layer.positions()
    weights = layer.weights(dtype)
    sums = layer.weights(torch.float32)
    suffix = f"{layer.name}/{dtype}".replace("torch.", "")
    multiplies = dtype != torch.float32  # float32 products are exact, in no tensor core

    config = tuned_config("hidden_backward", arch, of_class, dtype)
    num_parts = cdiv(layer.expert_dim, config.constexprs["BLOCK_N"])
    parts_CR = x_TD.new_empty((num_parts, chunk.num_rows), dtype=torch.float32)
    launch = hidden_backward_launch(
        hidden_RF, hidden_RF, hidden_RF, parts_CR, x_TD, x_TD, scores_N, chunk, weights,
        layer.activation(), config,
    )  # fmt: skip
    yield launch.variant(f"hidden_backward/{suffix}", needs_tensor_cores=multiplies)
    config = tuned_config("score_gradients", arch, "narrow", dtype)
    launch = score_gradients_launch(scores_N, parts_CR, x_TD, chunk, weights.b2_gD, config)
    yield launch.variant(f"score_gradients/{suffix}", needs_tensor_cores=False)

    config = tuned_config("dx", arch, of_class, dtype)
    for name, into, positions in (("dx_scatter", x_TD, None), ("dx_rows", y_RD, positions_N)):
        launch = dx_launch(
            into, positions, hidden_RF, hidden_RF, chunk, weights.w1_gFD, weights.w3_gFD, config
        )
        yield launch.variant(f"{name}/{suffix}", needs_tensor_cores=multiplies)

    config = tuned_config("dw13", arch, of_class, dtype)
    launch = dw13_launch(sums, hidden_RF, hidden_RF, x_TD, chunk, True, config)
    yield launch.variant(f"dw13/{suffix}", needs_tensor_cores=multiplies)
    config = tuned_config("dw2", arch, of_class, dtype)
    launch = dw2_launch(sums, x_TD, hidden_RF, chunk, True, config)
    yield launch.variant(f"dw2/{suffix}", needs_tensor_cores=multiplies)
    config = tuned_config("bias_gradient", arch, "narrow", dtype)
    for db_gX, values, scores in _bias_sums(sums, hidden_RF, hidden_RF, x_TD, scores_N):
        launch = bias_gradient_launch(db_gX, values, scores, chunk, True, config)
        yield launch.variant(f"bias_gradient/{suffix}", needs_tensor_cores=False)
