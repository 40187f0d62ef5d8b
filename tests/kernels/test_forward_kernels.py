"""The forward's kernels one by one against float64; without a GPU by Triton's interpreter."""

import pytest
import torch

from relay_kernels import SwiGLU
from relay_kernels.triton.launch_forward import down, up_gate
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


def forward(problem, max_rows, deterministic=False):
    """``(a of all rows, out)`` by chunks."""
    out_TD = torch.zeros(problem.num_tokens, problem.dim, dtype=problem.dtype, device=DEVICE)
    hiddens = []
    for chunk in problem.chunks(max_rows):
        a_RF = problem.empty(max_rows, problem.expert_dim)
        up_gate(a_RF, chunk, problem.weights, problem.activation)
        assert a_RF[chunk.num_rows :].isnan().all(), "written past the chunk"
        hiddens.append(a_RF[: chunk.num_rows])
        ordered = problem.ordered(max_rows) if deterministic else None
        down(out_TD, ordered, a_RF, chunk, problem.weights)
    return torch.cat(hiddens), out_TD


def check(problem, max_rows, deterministic=False):
    a, out_TD = forward(problem, max_rows, deterministic)
    assert_close(a, problem.true_hidden(), HIDDEN_TOLERANCE[problem.dtype], "a")
    # From the rounded a: the down projection is judged by itself.
    assert_close(out_TD, problem.true_out(a), OUT_TOLERANCE[problem.dtype], "out")


BOTH_ORDERS = pytest.mark.parametrize(
    ("max_rows", "deterministic"), [(100, False), (13, True)], ids=["any order", "fixed order"]
)


@BOTH_ORDERS
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, max_rows, deterministic):
    check(Problem(*SHAPES[shape]), max_rows, deterministic)


@BOTH_ORDERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_round_once(dtype, max_rows, deterministic):
    check(Problem((5, 0, 9), 9, 2, 18, 10, dtype=dtype), max_rows, deterministic)


def test_biases_and_the_clamped_activation():
    activation = SwiGLU(alpha=1.702, limit=0.7, up_offset=1.0)
    check(Problem((4, 7), 7, 2, 9, 20, has_biases=True, activation=activation), 100)


def test_a_random_routing_gives_the_same_sum_in_both_forms():
    problem = Problem((6, 2, 6), 6, 3, 10, 12, seed=5)
    first = forward(problem, 5, deterministic=True)[1]
    torch.testing.assert_close(forward(problem, 14)[1], first)


@pytest.mark.parametrize("which", ["x_TD", "rows_N"])
def test_views_that_a_kernel_cannot_address_are_refused(which):
    problem = Problem((2,), 2, 1, 3, 4, dtype=torch.float16)
    if which == "x_TD":
        problem.x_TD = torch.empty_strided((2, 3), (1, 2**30), dtype=torch.float16, device=DEVICE)
    else:
        problem.rows_N = torch.stack([problem.rows_N, problem.rows_N], 1)[:, 0]
    with pytest.raises((ValueError, AssertionError), match=r"2\^31 elements|one after another"):
        forward(problem, 2)
