"""Launches of the forward kernels: from a chunk's tensors to a kernel's arguments and grid.

With ``row = rows_N[i]`` and ``token = row // top_k``, for the chunk's rows ``first <= i < last``:

    up_gate    a[i - first] = act(W1 x[token] + b1, W3 x[token] + b3)
    down       out[token] += score * (W2 a[i - first] + b2)

``down`` sums in no fixed order (atomic sums), or with an ``OrderedSum`` in two launches:

    down       y[i - first] = score * (W2 a[i - first] + b2), and positions[row] = i
    sum_rows   out[token] += sum over k of y[positions[token K + k] - first], in fixed order

Operands may be any views; ``a_RF``, ``y_RD`` and ``out_TD`` need a last stride of 1, indices are
contiguous, and the last dimension spans less than 2^31 elements. All have one dtype but scores (any
floating) and indices.

Shape legend: T tokens, K top-k, N = T * K routed rows, R rows at most in a chunk, D model
dimension, F expert hidden dimension.
"""

import torch

from relay_kernels.activation import SwiGLU
from relay_kernels.rows import Chunk
from relay_kernels.triton.forward import down_kernel, up_gate_kernel
from relay_kernels.triton.launch import (
    Launch,
    activation_constexprs,
    cdiv,
    chunk_arguments,
    config_for,
    described_arguments,
    input_precision,
    narrow_config,
    num_programs,
    power_of_2,
    strides,
)
from relay_kernels.triton.sum_rows import sum_rows_kernel
from relay_kernels.tuning import TunedConfig
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace import OrderedSum


def up_gate(a_RF: torch.Tensor, chunk: Chunk, weights: ExpertWeights, activation: SwiGLU) -> None:
    """Gather, up and gate projections and the activation, into ``a_RF``."""
    _, expert_dim, dim = weights.w1_gFD.shape
    config = config_for("up_gate", chunk, dim, expert_dim, a_RF)
    launch = up_gate_launch(a_RF, chunk, weights, activation, config)
    launch.run((num_programs(chunk, expert_dim, config, a_RF.device),))


def down(
    out_TD: torch.Tensor,
    ordered: OrderedSum | None,
    a_RF: torch.Tensor,
    chunk: Chunk,
    weights: ExpertWeights,
) -> None:
    """Down projection, score, and sum into the rows' tokens."""
    _, dim, expert_dim = weights.w2_gDF.shape
    config = config_for("down", chunk, dim, expert_dim, a_RF)
    launch = down_launch(out_TD, ordered, a_RF, chunk, weights, config)
    launch.run((num_programs(chunk, dim, config, a_RF.device),))
    if ordered is not None:
        sum_rows(out_TD, ordered, chunk)


def sum_rows(out_TD: torch.Tensor, ordered: OrderedSum, chunk: Chunk) -> None:
    """The rows of the chunk summed into their tokens: choices ascending, in float32."""
    config = narrow_config("sum_rows", out_TD.device, ordered.y_RD.dtype)
    num_tokens, dim = out_TD.shape
    block_m, block_n = config.constexprs["BLOCK_M"], config.constexprs["BLOCK_N"]
    grid = (cdiv(num_tokens, block_m), cdiv(dim, block_n))
    sum_rows_launch(out_TD, ordered, chunk, config).run(grid)


def up_gate_launch(
    a_RF: torch.Tensor,
    chunk: Chunk,
    weights: ExpertWeights,
    activation: SwiGLU,
    config: TunedConfig,
) -> Launch:
    assert a_RF.stride(1) == 1
    x_TD, w1_gFD, w3_gFD = chunk.tokens.x_TD, weights.w1_gFD, weights.w3_gFD
    expert_dim, dim = w1_gFD.shape[1:]
    block = ("BLOCK_N", "BLOCK_K")
    operands, config = described_arguments(
        {"w1_ptr": (w1_gFD, block), "w3_ptr": (w3_gFD, block)}, config
    )
    return Launch(
        up_gate_kernel,
        {
            "a_ptr": a_RF,
            "x_ptr": x_TD,
            **operands,
            "b1_ptr": weights.b1_gF,
            "b3_ptr": weights.b3_gF,
            **chunk_arguments(chunk),
            "dim": dim,
            "expert_dim": expert_dim,
            "stride_ar": a_RF.stride(0),
            **strides("stride_x", "td", x_TD),
            **strides("stride_w1", "efd", w1_gFD),
            **strides("stride_w3", "efd", w3_gFD),
            **strides("stride_b1", "ef", weights.b1_gF),
            **strides("stride_b3", "ef", weights.b3_gF),
        },
        {
            "TOP_K": chunk.tokens.top_k,
            **activation_constexprs(activation),
            "INPUT_PRECISION": input_precision(x_TD.dtype),
            "EXPERTS": power_of_2(chunk.num_experts),
            "EVEN_K": dim % config.constexprs["BLOCK_K"] == 0,
        },
        config,
    )


def down_launch(
    out_TD: torch.Tensor,
    ordered: OrderedSum | None,
    a_RF: torch.Tensor,
    chunk: Chunk,
    weights: ExpertWeights,
    config: TunedConfig,
) -> Launch:
    into = out_TD if ordered is None else ordered.y_RD
    assert a_RF.stride(1) == 1
    assert into.stride(1) == 1
    w2_gDF, b2_gD = weights.w2_gDF, weights.b2_gD
    dim, expert_dim = w2_gDF.shape[1:]
    operands, config = described_arguments(
        {"a_ptr": (a_RF, ("BLOCK_M", "BLOCK_K")), "w2_ptr": (w2_gDF, ("BLOCK_N", "BLOCK_K"))},
        config,
    )
    return Launch(
        down_kernel,
        {
            "out_ptr": into,
            "positions_ptr": None if ordered is None else ordered.positions_N,
            **operands,
            "scores_ptr": chunk.tokens.scores_N,
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
            "TOP_K": chunk.tokens.top_k,
            "SCATTERS": ordered is None,
            "INPUT_PRECISION": input_precision(a_RF.dtype),
            "EXPERTS": power_of_2(chunk.num_experts),
            "EVEN_K": expert_dim % config.constexprs["BLOCK_K"] == 0,
        },
        config,
    )


def sum_rows_launch(
    out_TD: torch.Tensor, ordered: OrderedSum, chunk: Chunk, config: TunedConfig
) -> Launch:
    y_RD, positions_N = ordered.y_RD, ordered.positions_N
    assert out_TD.stride(1) == 1
    assert y_RD.stride(1) == 1
    assert positions_N.is_contiguous()
    return Launch(
        sum_rows_kernel,
        {
            "out_ptr": out_TD,
            "y_ptr": y_RD,
            "rows_ptr": chunk.tokens.rows_N,
            "positions_ptr": positions_N,
            "first": chunk.first,
            "last": chunk.last,
            "num_tokens": out_TD.shape[0],
            "dim": out_TD.shape[1],
            "stride_out": out_TD.stride(0),
            "stride_yr": y_RD.stride(0),
        },
        {"TOP_K": chunk.tokens.top_k},
        config,
    )
