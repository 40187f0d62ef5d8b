"""What the backward ops promise about what they touch, and to ``torch.library``."""

import math

import pytest
import torch

from relay_kernels import SwiGLU
from relay_kernels.ops_backward import (
    dx_rows_,
    dx_scatter_,
    hidden_backward_,
    weight_gradients_,
)
from tests.kernels.problem import DEVICE, Problem
from tests.kernels.test_backward_ops import backward, check, hidden_backward
from tests.kernels.true_backward import true_dx, true_hidden_backward

IMPLEMENTATIONS = pytest.mark.parametrize("kernels", ["triton", "torch"])


@IMPLEMENTATIONS
def test_tokens_without_rows_are_neither_read_nor_written(kernels):
    problem = Problem((3, 2), 7, 1, 9, 5, has_biases=True)
    routed = problem.rows_N[3:-3].long()
    idle = [token for token in range(7) if token not in routed.tolist()]
    assert idle
    for tensor in (problem.x_TD, problem.dout_TD, problem.scores_TK):
        tensor[idle] = math.nan
    hidden, dscores_N, dx_TD, sums = backward(problem, kernels, 100)
    assert not dx_TD[idle].any()
    assert dscores_N[idle].isnan().all()
    for tensor in (*hidden, dx_TD[routed], dscores_N[routed], *sums.tensors()):
        assert tensor.isfinite().all()


@IMPLEMENTATIONS
def test_three_steps_over_dirty_memory_stay_clean(kernels):
    # 12 rows of 16, and four more past the last offset: a grouped product leaves those unwritten,
    # and what a dirty allocator had there returns in the next step.
    problem = Problem((4, 0, 4), 12, 1, 16, 16, margin=4)
    dh1, dh3, _, _ = true_hidden_backward(problem)
    truth = true_dx(problem, dh1, dh3)
    for _ in range(3):
        _, _, dx_TD, sums = backward(problem, kernels, 12)
        torch.testing.assert_close(dx_TD.double(), truth, rtol=1e-5, atol=1e-5)
        assert not any(tensor[1].any() for tensor in sums.tensors())


@IMPLEMENTATIONS
def test_an_expert_that_overflows_spoils_no_other(kernels):
    # Neighbours share chunks and buffers, and 0 * inf would be NaN.
    problem = Problem((5, 3), 5, 2, 9, 5)
    problem.weights.w1_gFD[1] = math.inf
    hidden, _, _, sums = backward(problem, kernels, 100)
    assert not hidden[0][5:].isfinite().all()
    for tensor in (*(each[:5] for each in hidden), *(each[0] for each in sums.tensors())):
        assert tensor.isfinite().all()


@IMPLEMENTATIONS
def test_a_nan_is_not_hidden_by_the_clamps(kernels):
    activation = SwiGLU(alpha=1.702, limit=0.7, up_offset=1.0)
    problem = Problem((2,), 2, 1, 4, 4, activation=activation)
    problem.x_TD[0] = math.nan
    dh1_RF, dh3_RF, a_RF, dscores_N = hidden_backward(problem, problem.chunks(2)[0], kernels, 2)
    for tensor in (dh1_RF, dh3_RF, a_RF):
        assert tensor[0].isnan().all()
        assert tensor[1].isfinite().all()
    assert dscores_N.isnan().tolist() == [True, False]


@IMPLEMENTATIONS
def test_a_random_routing_by_small_chunks(kernels):
    check(Problem((6, 2, 6), 6, 3, 10, 12, seed=5), kernels, 5)


@IMPLEMENTATIONS
def test_opcheck(kernels):
    problem = Problem((2, 0, 1), 3, 2, 5, 4, has_biases=True)
    weights = problem.weights.arguments()
    where = (problem.rows_N, problem.offsets_G, 3, 6)
    dh1_RF, dh3_RF, a_RF = (torch.zeros(3, 4, device=DEVICE) for _ in range(3))
    dscores_N, dx_TD = torch.zeros(6, device=DEVICE), torch.zeros(3, 5, device=DEVICE)
    positions_N = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    sums = [torch.zeros_like(tensor) for tensor in weights]
    tokens = (problem.x_TD, problem.dout_TD, problem.scores_N, *where)
    dx = (dh1_RF, dh3_RF, *where, weights[0], weights[2], 2, 1, kernels)
    act = (1.702, 7.0, 1.0)
    hidden_backward = (dh1_RF, dh3_RF, a_RF, dscores_N, *tokens, *weights, 2, 1, *act, kernels)
    scores_alone = (None, None, None, dscores_N, *tokens, *weights, 2, 1, *act, kernels)
    calls = [
        (hidden_backward_, hidden_backward),
        (hidden_backward_, scores_alone),
        (dx_scatter_, (dx_TD, *dx)),
        (dx_rows_, (dx_TD.clone(), positions_N, *dx)),
        (weight_gradients_, (*sums, dh1_RF, dh3_RF, a_RF, *tokens, 2, 1, True, kernels)),
    ]
    for op, args in calls:
        torch.library.opcheck(op, args)
