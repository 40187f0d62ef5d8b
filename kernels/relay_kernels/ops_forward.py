"""The forward ops, ``torch.ops.relay_kernels.*``: in place, on the rows of a chunk.

Each has a declared mutation, a shape function, a plain PyTorch implementation (the reference) and
a Triton one; ``kernels`` chooses ("auto", "triton", "torch"; see ``choice``). They have no gradient
of their own, and in Triton never wait for the device.

    up_gate_        a[i - first] = act(W1 x[token] + b1, W3 x[token] + b3)
    down_scatter_   out[token] += score * (W2 a[i - first] + b2), in no fixed order (atomic sums)
    down_rows_      y[i - first] = score * (W2 a[i - first] + b2), and positions[row] = i
    sum_rows_       out[token] += sum over k of y[positions[token K + k] - first], in fixed order

for ``first <= i < last`` with ``row = rows_N[i]`` and ``token = row // top_k``; ``Chunk`` explains
``rows_N``, ``offsets_G``, ``first``, ``last``, ``top_k`` and ``rows_per_expert``. The last two ops
are the deterministic form of the second. An expert has a token once at most.

Shape legend: T tokens, K top-k, N = T * K routed rows, R rows at most in a chunk, D model
dimension, F expert hidden dimension, g experts. Operands may be any views; ``a_RF``, ``y_RD`` and
``out_TD`` need a last stride of 1, indices and scores are contiguous, and the last dimension spans
less than 2^31 elements. All have one dtype but ``scores_N`` (any floating) and the indices.
"""

import torch
from torch import Tensor

from relay_kernels import reference_forward
from relay_kernels.activation import SwiGLU
from relay_kernels.choice import uses_triton
from relay_kernels.chunk import Chunk

NAMESPACE = "relay_kernels"


@torch.library.custom_op(f"{NAMESPACE}::up_gate_", mutates_args=("a_RF",))
def up_gate_(
    a_RF: Tensor,
    x_TD: Tensor,
    rows_N: Tensor,
    offsets_G: Tensor,
    first: int,
    last: int,
    w1_gFD: Tensor,
    w3_gFD: Tensor,
    b1_gF: Tensor | None,
    b3_gF: Tensor | None,
    top_k: int,
    rows_per_expert: int,
    alpha: float,
    limit: float,
    up_offset: float,
    kernels: str,
) -> None:
    """Gather, up and gate projections and the activation, into ``a_RF``."""
    chunk = Chunk(rows_N, offsets_G, first, last, top_k, rows_per_expert)
    activation = SwiGLU(alpha, limit, up_offset)
    if chunk.num_rows == 0:
        return
    if uses_triton(kernels, x_TD.device, x_TD.dtype):
        from relay_kernels.triton import launch_forward

        launch_forward.up_gate(a_RF, x_TD, chunk, w1_gFD, w3_gFD, b1_gF, b3_gF, activation)
    else:
        reference_forward.up_gate(a_RF, x_TD, chunk, w1_gFD, w3_gFD, b1_gF, b3_gF, activation)


@torch.library.custom_op(f"{NAMESPACE}::down_scatter_", mutates_args=("out_TD",))
def down_scatter_(
    out_TD: Tensor,
    a_RF: Tensor,
    scores_N: Tensor,
    rows_N: Tensor,
    offsets_G: Tensor,
    first: int,
    last: int,
    w2_gDF: Tensor,
    b2_gD: Tensor | None,
    top_k: int,
    rows_per_expert: int,
    kernels: str,
) -> None:
    """Down projection, score, and sum into the rows' tokens."""
    chunk = Chunk(rows_N, offsets_G, first, last, top_k, rows_per_expert)
    if chunk.num_rows == 0:
        return
    if uses_triton(kernels, a_RF.device, a_RF.dtype):
        from relay_kernels.triton import launch_forward

        launch_forward.down(out_TD, None, a_RF, scores_N, chunk, w2_gDF, b2_gD)
    else:
        reference_forward.down_scatter(out_TD, a_RF, scores_N, chunk, w2_gDF, b2_gD)


@torch.library.custom_op(f"{NAMESPACE}::down_rows_", mutates_args=("y_RD", "positions_N"))
def down_rows_(
    y_RD: Tensor,
    positions_N: Tensor,
    a_RF: Tensor,
    scores_N: Tensor,
    rows_N: Tensor,
    offsets_G: Tensor,
    first: int,
    last: int,
    w2_gDF: Tensor,
    b2_gD: Tensor | None,
    top_k: int,
    rows_per_expert: int,
    kernels: str,
) -> None:
    """Down projection and score, row by row; ``positions_N`` is int32 of all N rows."""
    chunk = Chunk(rows_N, offsets_G, first, last, top_k, rows_per_expert)
    if chunk.num_rows == 0:
        return
    if uses_triton(kernels, a_RF.device, a_RF.dtype):
        from relay_kernels.triton import launch_forward

        launch_forward.down(y_RD, positions_N, a_RF, scores_N, chunk, w2_gDF, b2_gD)
    else:
        reference_forward.down_rows(y_RD, positions_N, a_RF, scores_N, chunk, w2_gDF, b2_gD)


@torch.library.custom_op(f"{NAMESPACE}::sum_rows_", mutates_args=("out_TD",))
def sum_rows_(
    out_TD: Tensor,
    y_RD: Tensor,
    positions_N: Tensor,
    rows_N: Tensor,
    offsets_G: Tensor,
    first: int,
    last: int,
    top_k: int,
    kernels: str,
) -> None:
    """The rows of the chunk summed into their tokens: choices ascending, in float32."""
    chunk = Chunk(rows_N, offsets_G, first, last, top_k, rows_per_expert=0)
    if chunk.num_rows == 0:
        return
    if uses_triton(kernels, y_RD.device, y_RD.dtype):
        from relay_kernels.triton import launch_forward

        launch_forward.sum_rows(out_TD, y_RD, positions_N, chunk)
    else:
        reference_forward.sum_rows(out_TD, y_RD, positions_N, chunk)


def _nothing(*_: object) -> None:
    """The shape function of an op that only writes into its arguments."""


for _op in (up_gate_, down_scatter_, down_rows_, sum_rows_):
    _op.register_fake(_nothing)
