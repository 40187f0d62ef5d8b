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
    config_for,
    described_arguments,
    even_sizes,
    layer_values,
    most_tiles,
    narrow_config,
)
from relay_kernels.triton.sum_rows import sum_rows_kernel
from relay_kernels.tuning import arch_of
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace import OrderedSum


def up_gate(a_RF: torch.Tensor, chunk: Chunk, weights: ExpertWeights, activation: SwiGLU) -> None:
    """Gather, up and gate projections and the activation, into ``a_RF``."""
    device = a_RF.device
    up_gate_launch(a_RF, chunk, weights, activation, arch_of(device)).run(device)


def down(
    out_TD: torch.Tensor,
    ordered: OrderedSum | None,
    a_RF: torch.Tensor,
    chunk: Chunk,
    weights: ExpertWeights,
) -> None:
    """Down projection, score, and sum into the rows' tokens."""
    device = a_RF.device
    down_launch(out_TD, ordered, a_RF, chunk, weights, arch_of(device)).run(device)
    if ordered is not None:
        sum_rows(out_TD, ordered, chunk)


def sum_rows(out_TD: torch.Tensor, ordered: OrderedSum, chunk: Chunk) -> None:
    """The rows of the chunk summed into their tokens: choices ascending, in float32."""
    device = out_TD.device
    sum_rows_launch(out_TD, ordered, chunk, arch_of(device)).run(device)


def up_gate_launch(
    a_RF: torch.Tensor, chunk: Chunk, weights: ExpertWeights, activation: SwiGLU, arch: str
) -> Launch:
    assert a_RF.stride(1) == 1
    expert_dim, dim = weights.w1_gFD.shape[1:]
    block = ("BLOCK_N", "BLOCK_K")
    operands, config = described_arguments(
        {"w1_ptr": (weights.w1_gFD, block), "w3_ptr": (weights.w3_gFD, block)},
        config_for("up_gate", chunk, weights, arch),
    )
    values = {
        **layer_values(chunk, weights),
        **operands,
        **activation_constexprs(activation),
        **even_sizes(config, K=dim),
        "a_ptr": a_RF,
        "stride_ar": a_RF.stride(0),
    }
    grid = most_tiles(chunk, expert_dim, config)
    return Launch(up_gate_kernel, values, config, grid, is_persistent=True)


def down_launch(
    out_TD: torch.Tensor,
    ordered: OrderedSum | None,
    a_RF: torch.Tensor,
    chunk: Chunk,
    weights: ExpertWeights,
    arch: str,
) -> Launch:
    into = out_TD if ordered is None else ordered.y_RD
    assert a_RF.stride(1) == 1
    assert into.stride(1) == 1
    dim, expert_dim = weights.w2_gDF.shape[1:]
    w2_block = ("BLOCK_N", "BLOCK_K")
    operands, config = described_arguments(
        {"a_ptr": (a_RF, ("BLOCK_M", "BLOCK_K")), "w2_ptr": (weights.w2_gDF, w2_block)},
        config_for("down", chunk, weights, arch),
    )
    values = {
        **layer_values(chunk, weights),
        **operands,
        **even_sizes(config, K=expert_dim),
        "out_ptr": into,
        "positions_ptr": None if ordered is None else ordered.positions_N,
        "stride_out": into.stride(0),
        "stride_ar": a_RF.stride(0),
        "SCATTERS": ordered is None,
    }
    return Launch(down_kernel, values, config, most_tiles(chunk, dim, config), is_persistent=True)


def sum_rows_launch(out_TD: torch.Tensor, ordered: OrderedSum, chunk: Chunk, arch: str) -> Launch:
    y_RD, positions_N = ordered.y_RD, ordered.positions_N
    assert out_TD.stride(1) == 1
    assert y_RD.stride(1) == 1
    assert positions_N.is_contiguous()
    config = narrow_config("sum_rows", y_RD.dtype, arch)
    num_tokens, dim = out_TD.shape
    block_m, block_n = config.constexprs["BLOCK_M"], config.constexprs["BLOCK_N"]
    values = {
        "out_ptr": out_TD,
        "y_ptr": y_RD,
        "rows_ptr": chunk.tokens.rows_N,
        "positions_ptr": positions_N,
        "first": chunk.first,
        "last": chunk.last,
        "num_tokens": num_tokens,
        "dim": dim,
        "stride_out": out_TD.stride(0),
        "stride_yr": y_RD.stride(0),
        "TOP_K": chunk.tokens.top_k,
    }
    return Launch(sum_rows_kernel, values, config, (cdiv(num_tokens, block_m), cdiv(dim, block_n)))
