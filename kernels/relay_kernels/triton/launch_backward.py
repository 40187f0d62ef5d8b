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
    chunk_arguments,
    config_for,
    described_arguments,
    input_precision,
    most_tiles,
    narrow_config,
    num_programs,
    persistent_programs,
    power_of_2,
    strides,
)
from relay_kernels.triton.launch_forward import sum_rows
from relay_kernels.tuning import TunedConfig
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
    expert_dim, dim = weights.w1_gFD.shape[1:]
    config = config_for("hidden_backward", chunk, dim, expert_dim, dout_TD)
    parts_CR = None
    if dscores_N is not None:
        num_parts = cdiv(expert_dim, config.constexprs["BLOCK_N"])
        parts_CR = dout_TD.new_empty((num_parts, chunk.num_rows), dtype=torch.float32)
    launch = hidden_backward_launch(hidden, parts_CR, dout_TD, chunk, weights, activation, config)
    launch.run((most_tiles(chunk, expert_dim, config),))
    if dscores_N is not None and parts_CR is not None:
        config = narrow_config("score_gradients", dout_TD.device, dout_TD.dtype)
        launch = score_gradients_launch(dscores_N, parts_CR, dout_TD, chunk, weights, config)
        launch.run((num_programs(chunk, 1, config, dout_TD.device),))


def dx(
    dx_TD: torch.Tensor,
    ordered: OrderedSum | None,
    hidden: HiddenGradients,
    chunk: Chunk,
    weights: ExpertWeights,
) -> None:
    """The input's gradient, summed into the rows' tokens."""
    expert_dim, dim = weights.w1_gFD.shape[1:]
    config = config_for("dx", chunk, dim, expert_dim, dx_TD)
    launch = dx_launch(dx_TD, ordered, hidden, chunk, weights, config)
    launch.run((most_tiles(chunk, dim, config),))
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
    expert_dim, dim = into.w1_gFD.shape[1:]
    device = dout_TD.device
    config = config_for("dw13", chunk, dim, expert_dim, dout_TD)
    launch = dw13_launch(into, hidden, chunk, accumulates, config)
    launch.run((_num_weight_programs(launch, chunk, device),))
    config = config_for("dw2", chunk, dim, expert_dim, dout_TD)
    launch = dw2_launch(into, hidden, dout_TD, chunk, accumulates, config)
    launch.run((_num_weight_programs(launch, chunk, device),))
    config = narrow_config("bias_gradient", device, dout_TD.dtype)
    for launch in bias_gradient_launches(into, hidden, dout_TD, chunk, accumulates, config):
        width = launch.arguments["num_values"]
        num_tiles = chunk.num_experts * cdiv(width, config.constexprs["BLOCK_N"])
        launch.run((persistent_programs(num_tiles, config, device),))


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
    x_TD = chunk.tokens.x_TD
    dh1_RF, dh3_RF, a_RF = hidden.dh1_RF, hidden.dh3_RF, hidden.a_RF
    row_strides = {tensor.stride() for tensor in (dh1_RF, dh3_RF, a_RF) if tensor is not None}
    assert len(row_strides) <= 1, "dh1, dh3 and a must have equal strides"
    stride_r, stride_f = row_strides.pop() if row_strides else (expert_dim, 1)
    assert stride_f == 1
    assert stride_r * config.constexprs["BLOCK_M"] < 2**31, "a tile's offsets take 32 bits"
    assert (dh1_RF is None) == (dh3_RF is None)
    return Launch(
        hidden_backward_kernel,
        {
            "dh1_ptr": dh1_RF,
            "dh3_ptr": dh3_RF,
            "a_ptr": a_RF,
            "parts_ptr": parts_CR,
            "x_ptr": x_TD,
            "dout_ptr": dout_TD,
            "scores_ptr": chunk.tokens.scores_N,
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
            "TOP_K": chunk.tokens.top_k,
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
    weights: ExpertWeights,
    config: TunedConfig,
) -> Launch:
    assert dscores_N.is_contiguous()
    return Launch(
        score_gradients_kernel,
        {
            "dscores_ptr": dscores_N,
            "parts_ptr": parts_CR,
            "dout_ptr": dout_TD,
            "b2_ptr": weights.b2_gD,
            **chunk_arguments(chunk),
            "num_parts": parts_CR.shape[0],
            "dim": dout_TD.shape[1],
            "stride_parts": parts_CR.stride(0),
            **strides("stride_g", "td", dout_TD),
            **strides("stride_b2", "ed", weights.b2_gD),
        },
        {"TOP_K": chunk.tokens.top_k, "EXPERTS": power_of_2(chunk.num_experts)},
        config,
    )


def dx_launch(
    dx_TD: torch.Tensor,
    ordered: OrderedSum | None,
    hidden: HiddenGradients,
    chunk: Chunk,
    weights: ExpertWeights,
    config: TunedConfig,
) -> Launch:
    dh1_RF, dh3_RF = hidden.dh1_RF, hidden.dh3_RF
    assert dh1_RF is not None
    assert dh3_RF is not None
    assert dh1_RF.stride() == dh3_RF.stride()
    assert dh1_RF.stride(1) == 1
    into = dx_TD if ordered is None else ordered.y_RD
    w1_gFD, w3_gFD = weights.w1_gFD, weights.w3_gFD
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
            "positions_ptr": None if ordered is None else ordered.positions_N,
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
            "TOP_K": chunk.tokens.top_k,
            "SCATTERS": ordered is None,
            "INPUT_PRECISION": input_precision(dh1_RF.dtype),
            "EXPERTS": power_of_2(chunk.num_experts),
            "EVEN_N": dim % config.constexprs["BLOCK_N"] == 0,
            "EVEN_K": expert_dim % config.constexprs["BLOCK_K"] == 0,
        },
        config,
    )


def dw13_launch(
    into: ExpertWeights,
    hidden: HiddenGradients,
    chunk: Chunk,
    accumulates: bool,
    config: TunedConfig,
) -> Launch:
    """W1's and W3's gradients, which share x."""
    dh1_RF, dh3_RF = hidden.dh1_RF, hidden.dh3_RF
    assert dh1_RF is not None
    assert dh3_RF is not None
    assert dh1_RF.stride() == dh3_RF.stride()
    outputs = (into.w1_gFD, into.w3_gFD)
    right = chunk.tokens.x_TD
    return _weight_launch(outputs, (dh1_RF, dh3_RF), right, False, chunk, accumulates, config)


def dw2_launch(
    into: ExpertWeights,
    hidden: HiddenGradients,
    dout_TD: torch.Tensor,
    chunk: Chunk,
    accumulates: bool,
    config: TunedConfig,
) -> Launch:
    assert hidden.a_RF is not None
    outputs, lefts = (into.w2_gDF, None), (dout_TD, None)
    return _weight_launch(outputs, lefts, hidden.a_RF, True, chunk, accumulates, config)


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
            "TOP_K": chunk.tokens.top_k,
            "GATHERS_LEFT": gathers_left,
            "ACCUMULATES": accumulates,
            "INPUT_PRECISION": input_precision(right.dtype),
            "EXPERTS": power_of_2(chunk.num_experts),
            "EVEN_M": num_left % config.constexprs["BLOCK_M"] == 0,
            "EVEN_N": num_right % config.constexprs["BLOCK_N"] == 0,
        },
        config,
    )


def bias_gradient_launches(
    into: ExpertWeights,
    hidden: HiddenGradients,
    dout_TD: torch.Tensor,
    chunk: Chunk,
    accumulates: bool,
    config: TunedConfig,
) -> list[Launch]:
    """Of b1, b2 and b3; none without biases."""
    # Where to sum, what, and by which scores if it is not scaled yet.
    sums = (
        (into.b1_gF, hidden.dh1_RF, None),
        (into.b2_gD, dout_TD, chunk.tokens.scores_N),
        (into.b3_gF, hidden.dh3_RF, None),
    )
    return [
        _bias_launch(db_gX, values, scores_N, chunk, accumulates, config)
        for db_gX, values, scores_N in sums
        if db_gX is not None and values is not None
    ]


def _bias_launch(
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
            "TOP_K": chunk.tokens.top_k,
            "ACCUMULATES": accumulates,
            "EXPERTS": power_of_2(chunk.num_experts),
        },
        config,
    )


def _num_weight_programs(launch: Launch, chunk: Chunk, device: torch.device) -> int:
    height, width = launch.arguments["num_left"], launch.arguments["num_right"]
    blocks = launch.config.constexprs
    num_tiles = cdiv(height, blocks["BLOCK_M"]) * cdiv(width, blocks["BLOCK_N"])
    return persistent_programs(chunk.num_experts * num_tiles, launch.config, device)
