"""The forward ops, Triton's and PyTorch's, against float64; without a GPU by its interpreter."""

import pytest
import torch

from relay_kernels import SwiGLU
from relay_kernels.ops_forward import down_rows_, down_scatter_, sum_rows_, up_gate_
from tests.kernels.problem import DEVICE, ROUNDING, Problem, assert_close

# One rounding of the result for a narrow dtype; in float32 the order of D or F sums.
HIDDEN_TOLERANCE = {torch.float32: 1e-6} | ROUNDING
# A token's K parts are rounded one by one as they are added, and cancel.
OUT_TOLERANCE = {torch.float32: 1e-6} | {dtype: 3 * one for dtype, one in ROUNDING.items()}

# The interpreter's tiles are 16 x 16 x 16 and its groups 2 tiles.
SHAPES = {
    "a row past a tile, then empty, one row, empty": ((17, 0, 1, 0), 17, 2, 16, 16),
    "one expert takes all": ((0, 37, 0), 37, 1, 19, 23),
    "every expert for every token": ((11, 11, 11), 11, 3, 7, 17),
    "one row": ((1,), 1, 1, 1, 1),
    "sizes of 10": ((3, 10), 10, 2, 10, 10),
}


def hidden(problem, first, last, kernels, max_rows):
    a_RF = problem.empty(max_rows, problem.expert_dim)
    weights, act = problem.weights, problem.activation
    up_gate_(
        a_RF, problem.x_TD, problem.rows_N, problem.offsets_G, first, last,
        weights.w1_gFD, weights.w3_gFD, weights.b1_gF, weights.b3_gF,
        problem.top_k, 16, act.alpha, act.limit, act.up_offset, kernels,
    )  # fmt: skip
    return a_RF


def forward(problem, kernels, max_rows, deterministic):
    """``(a of all rows, out)`` by chunks."""
    out_TD = torch.zeros(problem.num_tokens, problem.dim, dtype=problem.dtype, device=DEVICE)
    hiddens = []
    for first, last in problem.chunks(max_rows):
        a_RF = hidden(problem, first, last, kernels, max_rows)
        assert a_RF[last - first :].isnan().all(), "written past the chunk"
        hiddens.append(a_RF[: last - first])
        where = (problem.rows_N, problem.offsets_G, first, last)
        w2_gDF, b2_gD = problem.weights.w2_gDF, problem.weights.b2_gD
        if deterministic:
            y_RD = problem.empty(max_rows, problem.dim)
            positions_N = problem.empty(problem.num_rows, dtype=torch.int32)
            down_rows_(
                y_RD, positions_N, a_RF, problem.scores_N, *where, w2_gDF, b2_gD,
                problem.top_k, 16, kernels,
            )  # fmt: skip
            sum_rows_(out_TD, y_RD, positions_N, *where, problem.top_k, kernels)
        else:
            down_scatter_(
                out_TD, a_RF, problem.scores_N, *where, w2_gDF, b2_gD, problem.top_k, 16, kernels
            )
    return torch.cat(hiddens), out_TD


def check(problem, kernels, max_rows, deterministic=False):
    a, out_TD = forward(problem, kernels, max_rows, deterministic)
    assert_close(a, problem.true_hidden(), HIDDEN_TOLERANCE[problem.dtype], "a")
    # From the rounded a: the down projection is judged by itself.
    assert_close(out_TD, problem.true_out(a), OUT_TOLERANCE[problem.dtype], "out")


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, kernels):
    problem = Problem(*SHAPES[shape])
    check(problem, kernels, max_rows=100)
    check(problem, kernels, max_rows=13, deterministic=True)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_round_once(dtype, kernels):
    problem = Problem((5, 0, 9), 9, 2, 18, 10, dtype=dtype)
    check(problem, kernels, max_rows=100)
    check(problem, kernels, max_rows=100, deterministic=True)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_biases_and_the_clamped_activation(kernels):
    activation = SwiGLU(alpha=1.702, limit=0.7, up_offset=1.0)
    check(Problem((4, 7), 7, 2, 9, 20, has_biases=True, activation=activation), kernels, 100)
