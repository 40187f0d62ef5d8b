"""What the forward ops promise about what they touch, and to ``torch.library``."""

import math

import pytest
import torch

from relay_kernels import SwiGLU
from relay_kernels.ops_forward import down_rows_, down_scatter_, sum_rows_, up_gate_
from tests.kernels.problem import DEVICE, Problem
from tests.kernels.test_forward_ops import forward


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_tokens_without_rows_are_neither_read_nor_written(kernels, deterministic):
    problem = Problem((3, 2), 7, 1, 9, 5)
    routed = problem.rows_N[3:-3].long()
    idle = [token for token in range(7) if token not in routed.tolist()]
    assert idle
    problem.x_TD[idle] = math.nan
    problem.scores_TK[idle] = math.nan
    _, out_TD = forward(problem, kernels, 100, deterministic)
    assert not out_TD[idle].any()
    assert out_TD[routed].isfinite().all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_three_steps_over_dirty_memory_stay_clean(kernels, deterministic):
    # 12 rows of 16, and four more past the last offset: a grouped product leaves those unwritten,
    # and what a dirty allocator had there returns in the next step.
    problem = Problem((4, 0, 4), 12, 1, 16, 16, margin=4)
    truth = problem.true_out(problem.true_hidden())
    for _ in range(3):
        _, out_TD = forward(problem, kernels, 12, deterministic)
        torch.testing.assert_close(out_TD.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_a_nan_is_not_hidden_by_the_clamps(kernels):
    activation = SwiGLU(alpha=1.702, limit=0.7, up_offset=1.0)
    problem = Problem((2,), 2, 1, 4, 4, activation=activation)
    problem.x_TD[0] = math.nan
    _, out_TD = forward(problem, kernels, 2, False)
    assert out_TD[0].isnan().all()
    assert out_TD[1].isfinite().all()


@pytest.mark.parametrize("which", ["x_TD", "rows_N"])
def test_views_that_a_kernel_cannot_address_are_refused(which):
    problem = Problem((2,), 2, 1, 3, 4, dtype=torch.float16)
    if which == "x_TD":
        problem.x_TD = torch.empty_strided((2, 3), (1, 2**30), dtype=torch.float16, device=DEVICE)
    else:
        problem.rows_N = torch.stack([problem.rows_N, problem.rows_N], 1)[:, 0]
    with pytest.raises((ValueError, AssertionError), match=r"2\^31 elements|one after another"):
        forward(problem, "triton", 2, False)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_an_empty_chunk_does_nothing(kernels):
    problem = Problem((0, 0), 4, 1, 8, 8)
    a_RF = problem.empty(2, 8)
    weights = problem.weights
    up_gate_(
        a_RF, problem.x_TD, problem.rows_N, problem.offsets_G, 3, 3, weights.w1_gFD,
        weights.w3_gFD, None, None, 1, 1, 1.0, math.inf, 0.0, kernels,
    )  # fmt: skip
    assert a_RF.isnan().all()


def test_a_random_routing_gives_the_same_sum_in_both_forms():
    problem = Problem((6, 2, 6), 6, 3, 10, 12, seed=5)
    first = forward(problem, "triton", 5, True)[1]
    torch.testing.assert_close(forward(problem, "triton", 14, False)[1], first)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_opcheck(kernels):
    problem = Problem((2, 0, 1), 3, 2, 5, 4, has_biases=True)
    weights = problem.weights
    where = (problem.rows_N, problem.offsets_G, 3, 6)
    a_RF, out_TD = torch.zeros(3, 4, device=DEVICE), torch.zeros(3, 5, device=DEVICE)
    positions_N = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    down = (weights.w2_gDF, weights.b2_gD, 2, 1, kernels)
    up = (weights.w1_gFD, weights.w3_gFD, weights.b1_gF, weights.b3_gF)
    calls = [
        (up_gate_, (a_RF, problem.x_TD, *where, *up, 2, 1, 1.0, math.inf, 0.0, kernels)),
        (down_scatter_, (out_TD, a_RF, problem.scores_N, *where, *down)),
        (down_rows_, (out_TD.clone(), positions_N, a_RF, problem.scores_N, *where, *down)),
    ]
    for op, args in calls:
        torch.library.opcheck(op, args)
        op(*args)
    y_RD = calls[-1][1][0]
    torch.library.opcheck(sum_rows_, (out_TD, y_RD, positions_N, *where, 2, kernels))
