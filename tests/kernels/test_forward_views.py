"""Addresses in the forward kernels: views of every kind, odd sizes, offsets past 2^31."""

import pytest
import torch

from relay_kernels import ExpertWeights
from tests.kernels.problem import DEVICE, Problem
from tests.kernels.test_forward_kernels import check

# What a layer may pass: each view has the values of its argument.
VIEWS = {
    "transposed": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2),
    "every second row of a larger tensor": lambda w: torch.stack([w, w], 2).flatten(1, 2)[:, ::2],
    "every second column": lambda w: torch.stack([w, w], 3).flatten(2, 3)[:, :, ::2],
    "experts in the middle": lambda w: w.transpose(0, 1).contiguous().transpose(0, 1),
    "a slice that begins at an odd address": lambda w: torch.nn.functional.pad(w, (1, 2))[
        ..., 1:-2
    ],
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_weights_and_tokens_may_be_views(view, deterministic):
    problem = Problem((5, 0, 3), 5, 2, 18, 10, dtype=torch.bfloat16)
    problem.weights = problem.weights.map(VIEWS[view])
    problem.x_TD = VIEWS[view](problem.x_TD[None])[0]
    assert not problem.weights.w1_gFD.is_contiguous()
    check(problem, 100, deterministic)


@pytest.mark.parametrize("sizes", [(17, 192, 96), (1, 24, 40), (3, 10, 10), (2, 13, 31)])
def test_sizes_that_no_tile_or_vector_divides(sizes):
    rows, expert_dim, dim = sizes
    check(Problem((rows,), rows, 1, dim, expert_dim, dtype=torch.bfloat16), 100)


@pytest.mark.parametrize("deterministic", [False, True])
def test_descriptors_stop_at_every_edge(deterministic):
    # Weights of 16-byte rows go by descriptors; no size is a multiple of 16 elements.
    problem = Problem((17, 0, 3), 17, 2, 24, 40, dtype=torch.bfloat16, has_biases=True)
    check(problem, 13, deterministic)


@pytest.mark.slow
def test_larger_sizes_that_no_tile_divides():
    check(Problem((299, 300), 300, 2, 301, 299), 1024)


FAR = 2**31  # elements; an offset in 32 bits would wrap around


def far_apart(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor with its last index along ``dim`` ``FAR`` elements from the first.

    Memory that nobody touches costs nothing on a CPU, and 4 GiB in 16 bits on a device.
    """
    size = tensor.shape[dim]
    stride = -(-FAR // (size - 1)) + 1
    strides = [0] * tensor.dim()
    step = 1
    for other in reversed([d for d in range(tensor.dim()) if d != dim]):
        strides[other] = step
        step *= tensor.shape[other]
    assert step <= stride
    strides[dim] = stride
    storage = torch.empty((size - 1) * stride + step, dtype=tensor.dtype, device=DEVICE)
    view = storage.as_strided(tensor.shape, strides)
    assert (size - 1) * stride > FAR
    return view.copy_(tensor)


@pytest.mark.parametrize("which", ["experts", "tokens"])
def test_offsets_past_two_to_the_31(which):
    problem = Problem((2, 0, 3), 4, 2, 8, 6, dtype=torch.float16)
    if which == "tokens":
        problem.x_TD = far_apart(problem.x_TD, 0)
    else:
        weights = problem.weights
        near = (weights.w2_gDF, weights.w3_gFD)
        problem.weights = ExpertWeights(far_apart(weights.w1_gFD, 0), *near)
    check(problem, max_rows=100)
