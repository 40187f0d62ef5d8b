"""Addresses in the backward kernels: views of every kind, odd sizes, offsets past 2^31."""

import pytest
import torch

from tests.kernels.problem import Problem
from tests.kernels.test_backward_kernels import check
from tests.kernels.test_forward_views import VIEWS, far_apart


@pytest.mark.parametrize("view", VIEWS)
def test_operands_and_results_may_be_views(view):
    problem = Problem((5, 0, 3), 5, 2, 18, 10, dtype=torch.bfloat16)
    problem.weights = problem.weights.map(VIEWS[view])
    problem.x_TD = VIEWS[view](problem.x_TD[None])[0]
    problem.dout_TD = VIEWS[view](problem.dout_TD[None])[0]

    def place(result):
        return VIEWS[view](result[None])[0] if result.dim() == 2 else VIEWS[view](result)

    assert not place(problem.weights.w1_gFD.contiguous()).is_contiguous()
    check(problem, max_rows=100, place=place)


@pytest.mark.parametrize("sizes", [(17, 96, 48), (1, 24, 40), (3, 10, 10), (2, 13, 31)])
def test_sizes_that_no_tile_or_vector_divides(sizes):
    rows, expert_dim, dim = sizes
    check(Problem((rows,), rows, 1, dim, expert_dim, dtype=torch.bfloat16), 100)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(17, 192, 96), (150, 149, 151)])
def test_larger_sizes_that_no_tile_divides(sizes):
    rows, expert_dim, dim = sizes
    check(Problem((rows - 1, rows), rows, 2, dim, expert_dim), 1024)


def test_offsets_past_two_to_the_31():
    problem = Problem((2, 0, 3), 4, 2, 8, 6, dtype=torch.float16)
    problem.x_TD, problem.dout_TD = far_apart(problem.x_TD, 0), far_apart(problem.dout_TD, 0)
    problem.weights = problem.weights.map(lambda tensor: far_apart(tensor, 0))
    options = {"sum_dtype": torch.float16, "place": lambda tensor: far_apart(tensor, 0)}
    check(problem, max_rows=100, **options)
