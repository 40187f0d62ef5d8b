"""The backward ops, ``torch.ops.relay_kernels.*``: in place, on the rows of a chunk.

Made like the forward's (``ops_forward``): a declared mutation, a shape function, a plain PyTorch
implementation (the reference) and a Triton one that ``kernels`` chooses. With ``row = rows_N[i]``,
``token = row // top_k``, ``g = dout[token]``, ``s = scores[row]`` and ``h1, h3`` rebuilt:

    hidden_backward_   dh1, dh3 [i - first] = s * W2^T g * act'(h1, h3)
                       a[i - first] = s * act(h1, h3);  dscores[row] = <W2^T g, act> + <g, b2>
    dx_scatter_        dx[token] += W1^T dh1 + W3^T dh3, in no fixed order (atomic sums)
    dx_rows_           y[i - first] = W1^T dh1 + W3^T dh3, and positions[row] = i, for ``sum_rows_``
    weight_gradients_  dW1 (+)= dh1 x^T;  dW2 (+)= g a^T;  dW3 (+)= dh3 x^T;  and the biases'

All but ``dx_scatter_`` give the same bits for the same inputs.

Shape legend: T tokens, K top-k, N = T * K routed rows, R rows at most in a chunk, D model
dimension, F expert hidden dimension, g experts. Operands may be any views; workspace rows
(``dh1_RF, dh3_RF, a_RF``, of equal strides, and ``y_RD``) need a last stride of 1. All have one
dtype but scores and their gradients (any floating, contiguous), weight gradients (any floating) and
the indices (contiguous). The last dimension spans less than 2^31 elements.
"""

import torch
from torch import Tensor

from relay_kernels import reference_backward
from relay_kernels.activation import SwiGLU
from relay_kernels.choice import uses_triton
from relay_kernels.chunk import Chunk
from relay_kernels.ops_forward import NAMESPACE
from relay_kernels.weights import ExpertWeights


@torch.library.custom_op(
    f"{NAMESPACE}::hidden_backward_", mutates_args=("dh1_RF", "dh3_RF", "a_RF", "dscores_N")
)
def hidden_backward_(
    dh1_RF: Tensor | None,
    dh3_RF: Tensor | None,
    a_RF: Tensor | None,
    dscores_N: Tensor | None,
    x_TD: Tensor,
    dout_TD: Tensor,
    scores_N: Tensor,
    rows_N: Tensor,
    offsets_G: Tensor,
    first: int,
    last: int,
    w1_gFD: Tensor,
    w2_gDF: Tensor,
    w3_gFD: Tensor,
    b1_gF: Tensor | None,
    b2_gD: Tensor | None,
    b3_gF: Tensor | None,
    top_k: int,
    rows_per_expert: int,
    alpha: float,
    limit: float,
    up_offset: float,
    kernels: str,
) -> None:
    """Rebuild the hidden activations and turn them into gradients; None where nobody asks.

    ``dh1_RF`` and ``dh3_RF`` are given together or not at all.
    """
    if first == last:
        return
    chunk = Chunk(rows_N, offsets_G, first, last, top_k, rows_per_expert)
    weights = ExpertWeights(w1_gFD, w2_gDF, w3_gFD, b1_gF, b2_gD, b3_gF)
    args = (
        dh1_RF, dh3_RF, a_RF, dscores_N, x_TD, dout_TD, scores_N, chunk, weights,
        SwiGLU(alpha, limit, up_offset),
    )  # fmt: skip
    if uses_triton(kernels, x_TD.device, x_TD.dtype):
        from relay_kernels.triton import launch_backward

        launch_backward.hidden_backward(*args)
    else:
        reference_backward.hidden_backward(*args)


@torch.library.custom_op(f"{NAMESPACE}::dx_scatter_", mutates_args=("dx_TD",))
def dx_scatter_(
    dx_TD: Tensor,
    dh1_RF: Tensor,
    dh3_RF: Tensor,
    rows_N: Tensor,
    offsets_G: Tensor,
    first: int,
    last: int,
    w1_gFD: Tensor,
    w3_gFD: Tensor,
    top_k: int,
    rows_per_expert: int,
    kernels: str,
) -> None:
    """The input's gradient, summed into the rows' tokens."""
    if first == last:
        return
    chunk = Chunk(rows_N, offsets_G, first, last, top_k, rows_per_expert)
    if uses_triton(kernels, dh1_RF.device, dh1_RF.dtype):
        from relay_kernels.triton import launch_backward

        launch_backward.dx(dx_TD, None, dh1_RF, dh3_RF, chunk, w1_gFD, w3_gFD)
    else:
        reference_backward.dx_scatter(dx_TD, dh1_RF, dh3_RF, chunk, w1_gFD, w3_gFD)


@torch.library.custom_op(f"{NAMESPACE}::dx_rows_", mutates_args=("y_RD", "positions_N"))
def dx_rows_(
    y_RD: Tensor,
    positions_N: Tensor,
    dh1_RF: Tensor,
    dh3_RF: Tensor,
    rows_N: Tensor,
    offsets_G: Tensor,
    first: int,
    last: int,
    w1_gFD: Tensor,
    w3_gFD: Tensor,
    top_k: int,
    rows_per_expert: int,
    kernels: str,
) -> None:
    """The input's gradient row by row; ``positions_N`` is int32 of all N rows."""
    if first == last:
        return
    chunk = Chunk(rows_N, offsets_G, first, last, top_k, rows_per_expert)
    if uses_triton(kernels, dh1_RF.device, dh1_RF.dtype):
        from relay_kernels.triton import launch_backward

        launch_backward.dx(y_RD, positions_N, dh1_RF, dh3_RF, chunk, w1_gFD, w3_gFD)
    else:
        reference_backward.dx_rows(y_RD, positions_N, dh1_RF, dh3_RF, chunk, w1_gFD, w3_gFD)


@torch.library.custom_op(
    f"{NAMESPACE}::weight_gradients_",
    mutates_args=("dw1_gFD", "dw2_gDF", "dw3_gFD", "db1_gF", "db2_gD", "db3_gF"),
)
def weight_gradients_(
    dw1_gFD: Tensor,
    dw2_gDF: Tensor,
    dw3_gFD: Tensor,
    db1_gF: Tensor | None,
    db2_gD: Tensor | None,
    db3_gF: Tensor | None,
    dh1_RF: Tensor,
    dh3_RF: Tensor,
    a_RF: Tensor,
    x_TD: Tensor,
    dout_TD: Tensor,
    scores_N: Tensor,
    rows_N: Tensor,
    offsets_G: Tensor,
    first: int,
    last: int,
    top_k: int,
    rows_per_expert: int,
    accumulates: bool,
    kernels: str,
) -> None:
    """The chunk's share of the weights' and biases' gradients.

    With ``accumulates`` it is added to what is there. Without, the chunk in which an expert's rows
    begin overwrites, the chunks in which they go on add, and an expert without rows gets zeros:
    the chunks of a call must cover the experts' rows in order, and there is one even for no rows.
    """
    if first == last and accumulates:
        return
    chunk = Chunk(rows_N, offsets_G, first, last, top_k, rows_per_expert)
    into = ExpertWeights(dw1_gFD, dw2_gDF, dw3_gFD, db1_gF, db2_gD, db3_gF)
    args = (into, dh1_RF, dh3_RF, a_RF, x_TD, dout_TD, scores_N, chunk, accumulates)
    if uses_triton(kernels, x_TD.device, x_TD.dtype):
        from relay_kernels.triton import launch_backward

        launch_backward.weight_gradients(*args)
    else:
        reference_backward.weight_gradients(*args)


def _nothing(*_: object) -> None:
    """The shape function of an op that only writes into its arguments."""


for _op in (hidden_backward_, dx_scatter_, dx_rows_, weight_gradients_):
    _op.register_fake(_nothing)
