"""Launches of the backward kernels: from a chunk's tensors to a kernel's arguments and grid.

With ``row = rows_N[i]``, ``token = row // top_k``, ``g = dout[token]``, ``s = scores[row]`` and
``h1, h3`` rebuilt, for the rows ``first <= i < last`` of a chunk:

    hidden_backward    dh1, dh3 [i - first] = s * W2^T g * act'(h1, h3)
                       a[i - first] = s * act(h1, h3);  dscores[row] = <W2^T g, act> + <g, b2>
    dx                 dx[token] += W1^T dh1 + W3^T dh3
    weight_gradients   dW1 (+)= dh1 x^T;  dW2 (+)= g a^T;  dW3 (+)= dh3 x^T;  and the biases'

``dx`` sums in no fixed order, or with an ``OrderedSum`` in a fixed one (``launch_forward``). The
others give the same bits for the same inputs.

Operands may be any views; hidden gradients, of equal strides, need a last stride of 1. All have one
dtype but scores and their gradients (any floating, contiguous), weight gradients (any floating) and
the indices (contiguous). The last dimension spans less than 2^31 elements.

Shape legend: T tokens, K top-k, N = T * K routed rows, R rows of the chunk, D model dimension, F
expert hidden dimension, g experts, C column tiles of F.
"""

from collections.abc import Iterator

import torch

from relay_kernels.activation import SwiGLU
from relay_kernels.rows import Chunk
from relay_kernels.triton.backward_hidden import hidden_backward_kernel, score_gradients_kernel
from relay_kernels.triton.backward_products import (
    bias_gradient_kernel,
    dx_kernel,
    weight_gradient_kernel,
)
from relay_kernels.triton.launch import (
    Launch,
    activation_constexprs,
    cdiv,
    chunk_values,
    config_for,
    described_arguments,
    even_sizes,
    layer_values,
    most_tiles,
    narrow_config,
    operand,
)
from relay_kernels.triton.launch_forward import sum_rows
from relay_kernels.tuning import TunedConfig, arch_of
from relay_kernels.weights import ExpertWeights
from relay_kernels.workspace import HiddenGradients, OrderedSum


def hidden_backward(
    hidden: HiddenGradients,
    dscores_N: torch.Tensor | None,
    dout_TD: torch.Tensor,
    chunk: Chunk,
    weights: ExpertWeights,
    activation: SwiGLU,
) -> None:
    """Rebuild the hidden activations and turn them into gradients; None where nobody asks.

    Allocates ``4 * C`` bytes per row when score gradients are asked for.
    """
    device, arch = dout_TD.device, arch_of(dout_TD.device)
    config = config_for("hidden_backward", chunk, weights, arch)
    parts_CR = None if dscores_N is None else score_parts(chunk, weights, config)
    launch = hidden_backward_launch(hidden, parts_CR, dout_TD, chunk, weights, activation, config)
    launch.run(device)
    if dscores_N is not None and parts_CR is not None:
        score_gradients_launch(dscores_N, parts_CR, dout_TD, chunk, weights, arch).run(device)


def score_parts(chunk: Chunk, weights: ExpertWeights, config: TunedConfig) -> torch.Tensor:
    """Room for each column tile's share of the score gradients, ``parts_CR`` in float32."""
    num_parts = cdiv(weights.w1_gFD.shape[1], config.constexprs["BLOCK_N"])
    return chunk.tokens.x_TD.new_empty((num_parts, chunk.num_rows), dtype=torch.float32)


def dx(
    dx_TD: torch.Tensor,
    ordered: OrderedSum | None,
    hidden: HiddenGradients,
    chunk: Chunk,
    weights: ExpertWeights,
) -> None:
    """The input's gradient, summed into the rows' tokens."""
    device = dx_TD.device
    dx_launch(dx_TD, ordered, hidden, chunk, weights, arch_of(device)).run(device)
    if ordered is not None:
        sum_rows(dx_TD, ordered, chunk)


def weight_gradients(
    into: ExpertWeights,
    hidden: HiddenGradients,
    dout_TD: torch.Tensor,
    chunk: Chunk,
    accumulates: bool,
) -> None:
    """The chunk's share of the weights' and biases' gradients.

    With ``accumulates`` it is added to what is there. Without, the chunk in which an expert's rows
    begin overwrites, the chunks in which they go on add, and an expert without rows gets zeros:
    the chunks of a call must cover the experts' rows in order.
    """
    device, arch = dout_TD.device, arch_of(dout_TD.device)
    dw13_launch(into, hidden, chunk, accumulates, arch).run(device)
    dw2_launch(into, hidden, dout_TD, chunk, accumulates, arch).run(device)
    for launch in bias_gradient_launches(into, hidden, dout_TD, chunk, accumulates, arch):
        launch.run(device)


def hidden_backward_launch(
    hidden: HiddenGradients,
    parts_CR: torch.Tensor | None,
    dout_TD: torch.Tensor,
    chunk: Chunk,
    weights: ExpertWeights,
    activation: SwiGLU,
    config: TunedConfig,
) -> Launch:
    expert_dim, dim = weights.w1_gFD.shape[1:]
    dh1_RF, dh3_RF, a_RF = hidden.dh1_RF, hidden.dh3_RF, hidden.a_RF
    row_strides = {tensor.stride() for tensor in (dh1_RF, dh3_RF, a_RF) if tensor is not None}
    assert len(row_strides) <= 1, "dh1, dh3 and a must have equal strides"
    stride_r, stride_f = row_strides.pop() if row_strides else (expert_dim, 1)
    assert stride_f == 1
    assert stride_r * config.constexprs["BLOCK_M"] < 2**31, "a tile's offsets take 32 bits"
    assert (dh1_RF is None) == (dh3_RF is None)
    values = {
        **layer_values(chunk, weights),
        **activation_constexprs(activation),
        **even_sizes(config, N=expert_dim, K=dim),
        **operand("g", "td", dout_TD),
        "dh1_ptr": dh1_RF,
        "dh3_ptr": dh3_RF,
        "a_ptr": a_RF,
        "parts_ptr": parts_CR,
        "stride_r": stride_r,
        "stride_parts": 0 if parts_CR is None else parts_CR.stride(0),
    }
    grid = most_tiles(chunk, expert_dim, config)
    return Launch(hidden_backward_kernel, values, config, grid)


def score_gradients_launch(
    dscores_N: torch.Tensor,
    parts_CR: torch.Tensor,
    dout_TD: torch.Tensor,
    chunk: Chunk,
    weights: ExpertWeights,
    arch: str,
) -> Launch:
    assert dscores_N.is_contiguous()
    config = narrow_config("score_gradients", dout_TD.dtype, arch)
    values = {
        **layer_values(chunk, weights),
        **operand("g", "td", dout_TD),
        "dscores_ptr": dscores_N,
        "parts_ptr": parts_CR,
        "num_parts": parts_CR.shape[0],
        "stride_parts": parts_CR.stride(0),
    }
    grid = most_tiles(chunk, 1, config)
    return Launch(score_gradients_kernel, values, config, grid, is_persistent=True)


def dx_launch(
    dx_TD: torch.Tensor,
    ordered: OrderedSum | None,
    hidden: HiddenGradients,
    chunk: Chunk,
    weights: ExpertWeights,
    arch: str,
) -> Launch:
    dh1_RF, dh3_RF = hidden.dh1_RF, hidden.dh3_RF
    assert dh1_RF is not None
    assert dh3_RF is not None
    assert dh1_RF.stride() == dh3_RF.stride()
    assert dh1_RF.stride(1) == 1
    expert_dim, dim = weights.w1_gFD.shape[1:]
    rows_block, weights_block = ("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")
    operands, config = described_arguments(
        {
            "dh1_ptr": (dh1_RF, rows_block),
            "dh3_ptr": (dh3_RF, rows_block),
            "w1_ptr": (weights.w1_gFD, weights_block),
            "w3_ptr": (weights.w3_gFD, weights_block),
        },
        config_for("dx", chunk, weights, arch),
    )
    values = {
        **layer_values(chunk, weights),
        **operands,
        **operand("dx", "td", dx_TD if ordered is None else ordered.y_RD),
        **even_sizes(config, N=dim, K=expert_dim),
        "positions_ptr": None if ordered is None else ordered.positions_N,
        "stride_r": dh1_RF.stride(0),
        "SCATTERS": ordered is None,
    }
    return Launch(dx_kernel, values, config, most_tiles(chunk, dim, config))


def dw13_launch(
    into: ExpertWeights, hidden: HiddenGradients, chunk: Chunk, accumulates: bool, arch: str
) -> Launch:
    """W1's and W3's gradients, which share x."""
    dh1_RF, dh3_RF = hidden.dh1_RF, hidden.dh3_RF
    assert dh1_RF is not None
    assert dh3_RF is not None
    assert dh1_RF.stride() == dh3_RF.stride()
    outputs, lefts = (into.w1_gFD, into.w3_gFD), (dh1_RF, dh3_RF)
    config = config_for("dw13", chunk, into, arch)
    right = chunk.tokens.x_TD
    return _weight_launch(outputs, lefts, right, chunk, config, accumulates, gathers_left=False)


def dw2_launch(
    into: ExpertWeights,
    hidden: HiddenGradients,
    dout_TD: torch.Tensor,
    chunk: Chunk,
    accumulates: bool,
    arch: str,
) -> Launch:
    right = hidden.a_RF
    assert right is not None
    outputs, lefts = (into.w2_gDF, None), (dout_TD, None)
    config = config_for("dw2", chunk, into, arch)
    return _weight_launch(outputs, lefts, right, chunk, config, accumulates, gathers_left=True)


def _weight_launch(
    outputs: tuple[torch.Tensor, torch.Tensor | None],
    lefts: tuple[torch.Tensor, torch.Tensor | None],
    right: torch.Tensor,
    chunk: Chunk,
    config: TunedConfig,
    accumulates: bool,
    gathers_left: bool,
) -> Launch:
    num_left, num_right = outputs[0].shape[1:]
    values = {
        **chunk_values(chunk),
        **even_sizes(config, M=num_left, N=num_right),
        **operand("dw", "emn", outputs[0]),
        **operand("dw_b", "emn", outputs[1]),
        **operand("left", "rm", lefts[0]),
        "left_b_ptr": lefts[1],
        **operand("right", "rn", right),
        "num_left": num_left,
        "num_right": num_right,
        "GATHERS_LEFT": gathers_left,
        "ACCUMULATES": accumulates,
    }
    block_m, block_n = config.constexprs["BLOCK_M"], config.constexprs["BLOCK_N"]
    grid = (chunk.num_experts * cdiv(num_left, block_m) * cdiv(num_right, block_n),)
    return Launch(weight_gradient_kernel, values, config, grid, is_persistent=True)


def bias_gradient_launches(
    into: ExpertWeights,
    hidden: HiddenGradients,
    dout_TD: torch.Tensor,
    chunk: Chunk,
    accumulates: bool,
    arch: str,
) -> Iterator[Launch]:
    """Of b1, b2 and b3; none without biases."""
    # Where to sum, what, and by which scores if it is not scaled yet.
    sums = (
        (into.b1_gF, hidden.dh1_RF, None),
        (into.b2_gD, dout_TD, chunk.tokens.scores_N),
        (into.b3_gF, hidden.dh3_RF, None),
    )
    config = narrow_config("bias_gradient", dout_TD.dtype, arch)
    for db_gX, values_RX, scores_N in sums:
        if db_gX is None or values_RX is None:
            continue
        num_values = db_gX.shape[1]
        values = {
            **chunk_values(chunk),
            **operand("db", "en", db_gX),
            **operand("values", "rn", values_RX),
            "scores_ptr": scores_N,
            "num_values": num_values,
            "ACCUMULATES": accumulates,
        }
        grid = (chunk.num_experts * cdiv(num_values, config.constexprs["BLOCK_N"]),)
        yield Launch(bias_gradient_kernel, values, config, grid, is_persistent=True)
