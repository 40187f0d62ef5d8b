"""The backward's kernels one by one against float64; without a GPU by Triton's interpreter."""

import math

import pytest
import torch

from relay_kernels import SwiGLU
from relay_kernels.triton.launch_backward import dx, hidden_backward, weight_gradients
from relay_kernels.workspace import HiddenGradients
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


def backward(problem, max_rows, *, deterministic=False, sum_dtype=torch.float32, place=None):
    """``[dh1, dh3, a]`` of all rows, dscores, dx and the weights' gradients, by chunks.

    ``place`` makes other views of the buffers for dx and the weights' gradients.
    """
    dx_TD = torch.zeros(problem.num_tokens, problem.dim, dtype=problem.dtype, device=DEVICE)
    dscores_N = problem.empty(problem.num_rows, dtype=torch.float32)
    sums = problem.weights.map(lambda tensor: problem.empty(*tensor.shape, dtype=sum_dtype))
    if place is not None:
        dx_TD, sums = place(dx_TD), sums.map(place)
    pieces = []
    for chunk in problem.chunks(max_rows):
        buffers = [problem.empty(max_rows, problem.expert_dim) for _ in range(3)]
        hidden = HiddenGradients(*buffers)
        hidden_backward(
            hidden, dscores_N, problem.dout_TD, chunk, problem.weights, problem.activation
        )
        for tensor in buffers:
            assert tensor[chunk.num_rows :].isnan().all(), "written past the chunk"
        pieces.append([tensor[: chunk.num_rows] for tensor in buffers])
        ordered = problem.ordered(max_rows) if deterministic else None
        dx(dx_TD, ordered, hidden, chunk, problem.weights)
        weight_gradients(sums, hidden, problem.dout_TD, chunk, False)
    return [torch.cat(each) for each in zip(*pieces, strict=True)], dscores_N, dx_TD, sums


def check(problem, max_rows, **options):
    hidden, dscores_N, dx_TD, sums = backward(problem, max_rows, **options)
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


@pytest.mark.parametrize(
    ("max_rows", "deterministic"), [(100, False), (13, True)], ids=["any order", "fixed order"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape, max_rows, deterministic):
    check(Problem(*SHAPES[shape]), max_rows, deterministic=deterministic)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_wide", [True, False], ids=["float32 sums", "narrow sums"])
def test_narrow_dtypes_round_once(dtype, is_wide):
    problem = Problem((5, 0, 9), 9, 2, 24, 40, dtype=dtype)
    if is_wide:
        check(problem, max_rows=100)
    else:
        check(problem, max_rows=8, deterministic=True, sum_dtype=dtype)


def test_biases_and_the_clamped_activation():
    activation = SwiGLU(alpha=1.702, limit=0.7, up_offset=1.0)
    problem = Problem((0, 4, 7, 0), 7, 2, 9, 35, has_biases=True, activation=activation)
    check(problem, 5)


def test_a_random_routing_by_small_chunks():
    check(Problem((6, 2, 6), 6, 3, 10, 12, seed=5), 5)


def test_an_expert_that_overflows_spoils_no_other():
    # Neighbours share chunks and buffers, and 0 * inf would be NaN.
    problem = Problem((5, 3), 5, 2, 9, 5)
    problem.weights.w1_gFD[1] = math.inf
    hidden, _, _, sums = backward(problem, 100)
    assert not hidden[0][5:].isfinite().all()
    for tensor in (*(each[:5] for each in hidden), *(each[0] for each in sums.tensors())):
        assert tensor.isfinite().all()


def test_a_nan_is_not_hidden_by_the_clamps():
    activation = SwiGLU(alpha=1.702, limit=0.7, up_offset=1.0)
    problem = Problem((2,), 2, 1, 4, 4, activation=activation)
    problem.x_TD[0] = math.nan
    hidden, dscores_N, _, _ = backward(problem, 2)
    for tensor in hidden:
        assert tensor[0].isnan().all()
        assert tensor[1].isfinite().all()
    assert dscores_N.isnan().tolist() == [True, False]
