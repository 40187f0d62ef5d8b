"""The backward ops, Triton's and PyTorch's, against float64; without a GPU by its interpreter."""

import pytest
import torch

from relay_kernels import SwiGLU
from relay_kernels.ops_backward import (
    dx_rows_,
    dx_scatter_,
    hidden_backward_,
    weight_gradients_,
)
from relay_kernels.ops_forward import sum_rows_
from tests.kernels.problem import DEVICE, ROUNDING, Problem, assert_close
from tests.kernels.true_backward import true_dx, true_hidden_backward, true_weight_gradients

# One rounding of the result for a narrow dtype; in float32 the order of D or F sums.
FLOAT32_SUM = 1e-6
HIDDEN_TOLERANCE = {torch.float32: FLOAT32_SUM} | ROUNDING
# A token's K parts, or the parts of a weight's gradient in two chunks, are rounded one by one as
# they are added, and cancel.
SUM_TOLERANCE = {torch.float32: FLOAT32_SUM} | {dtype: 3 * one for dtype, one in ROUNDING.items()}

# The interpreter's tiles are 16 wide (hidden_backward's 32) and its groups 2 tiles.
SHAPES = {
    "a row past a tile, then empty, one row, empty": ((17, 0, 1, 0), 17, 2, 16, 33),
    "one expert takes all": ((0, 37, 0), 37, 1, 19, 23),
    "every expert for every token": ((11, 11, 11), 11, 3, 7, 17),
    "one row": ((1,), 1, 1, 1, 1),
    "sizes of 10": ((3, 10), 10, 2, 10, 10),
}
IMPLEMENTATIONS = pytest.mark.parametrize("kernels", ["triton", "torch"])


def hidden_backward(problem, chunk, kernels, max_rows, outputs=None):
    """``dh1, dh3, a`` of R rows and the score gradients; ``outputs`` gives buffers or None."""
    if outputs is None:
        outputs = [problem.empty(max_rows, problem.expert_dim) for _ in range(3)]
        outputs += [problem.empty(problem.num_rows, dtype=torch.float32)]
    act = problem.activation
    hidden_backward_(
        *outputs, problem.x_TD, problem.dout_TD, problem.scores_N, problem.rows_N,
        problem.offsets_G, *chunk, *problem.weights.arguments(), problem.top_k, 16,
        act.alpha, act.limit, act.up_offset, kernels,
    )  # fmt: skip
    return outputs


def weight_gradients(problem, into, hidden, chunk, accumulates, kernels):
    weight_gradients_(
        *into.arguments(), *hidden, problem.x_TD, problem.dout_TD, problem.scores_N, problem.rows_N,
        problem.offsets_G, *chunk, problem.top_k, 16, accumulates, kernels,
    )  # fmt: skip


def backward(
    problem, kernels, max_rows, *, deterministic=False, sum_dtype=torch.float32, place=None
):
    """``[dh1, dh3, a]`` of all rows, dscores, dx and the weights' gradients, by chunks.

    ``place`` makes other views of the buffers for dx and the weights' gradients.
    """
    dx_TD = torch.zeros(problem.num_tokens, problem.dim, dtype=problem.dtype, device=DEVICE)
    dscores_N = problem.empty(problem.num_rows, dtype=torch.float32)
    sums = problem.weights.map(lambda tensor: problem.empty(*tensor.shape, dtype=sum_dtype))
    if place is not None:
        dx_TD, sums = place(dx_TD), sums.map(place)
    pieces = []
    for first, last in problem.chunks(max_rows):
        hidden = [problem.empty(max_rows, problem.expert_dim) for _ in range(3)]
        hidden_backward(problem, (first, last), kernels, max_rows, [*hidden, dscores_N])
        for tensor in hidden:
            assert tensor[last - first :].isnan().all(), "written past the chunk"
        pieces.append([tensor[: last - first] for tensor in hidden])
        where = (problem.rows_N, problem.offsets_G, first, last)
        w1_gFD, w3_gFD = problem.weights.w1_gFD, problem.weights.w3_gFD
        if deterministic:
            y_RD = problem.empty(max_rows, problem.dim)
            positions_N = problem.empty(problem.num_rows, dtype=torch.int32)
            dx_rows_(
                y_RD, positions_N, *hidden[:2], *where, w1_gFD, w3_gFD, problem.top_k, 16, kernels
            )
            sum_rows_(dx_TD, y_RD, positions_N, *where, problem.top_k, kernels)
        else:
            dx_scatter_(dx_TD, *hidden[:2], *where, w1_gFD, w3_gFD, problem.top_k, 16, kernels)
        weight_gradients(problem, sums, hidden, (first, last), False, kernels)
    return [torch.cat(each) for each in zip(*pieces, strict=True)], dscores_N, dx_TD, sums


def check(problem, kernels, max_rows, **options):
    hidden, dscores_N, dx_TD, sums = backward(problem, kernels, max_rows, **options)
    *true_hidden, true_dscores_N = true_hidden_backward(problem)
    for name, actual, truth in zip(("dh1", "dh3", "a"), hidden, true_hidden, strict=True):
        assert_close(actual, truth, HIDDEN_TOLERANCE[problem.dtype], name)
    is_row_N = ~true_dscores_N.isnan()
    assert_close(dscores_N[is_row_N], true_dscores_N[is_row_N], FLOAT32_SUM, "dscores")
    assert dscores_N[~is_row_N].isnan().all(), "a score gradient of nobody's row"
    assert_close(dx_TD, true_dx(problem, *hidden[:2]), SUM_TOLERANCE[problem.dtype], "dx")
    truths = true_weight_gradients(problem, *hidden)
    for index, (actual, truth) in enumerate(zip(sums.tensors(), truths, strict=True)):
        assert_close(actual, truth, SUM_TOLERANCE[actual.dtype], f"weight gradient {index}")


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape, kernels):
    problem = Problem(*SHAPES[shape])
    check(problem, kernels, max_rows=100)
    check(problem, kernels, max_rows=13, deterministic=True)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_round_once(dtype, kernels):
    problem = Problem((5, 0, 9), 9, 2, 24, 40, dtype=dtype)
    check(problem, kernels, max_rows=100)
    check(problem, kernels, max_rows=8, deterministic=True, sum_dtype=dtype)


@IMPLEMENTATIONS
def test_biases_and_the_clamped_activation(kernels):
    activation = SwiGLU(alpha=1.702, limit=0.7, up_offset=1.0)
    problem = Problem((0, 4, 7, 0), 7, 2, 9, 35, has_biases=True, activation=activation)
    check(problem, kernels, 5)
