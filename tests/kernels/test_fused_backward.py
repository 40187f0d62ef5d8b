"""``backward_experts_`` by the fused kernels: chunks, what is left out, workspaces, fixed bits."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from relay_kernels import (
    Gradients,
    StepShape,
    backward_experts_,
    backward_workspace,
    backward_workspace_bytes,
)
from tests.kernels.problem import DEVICE, Problem, assert_close
from tests.kernels.true_backward import true_dx, true_hidden_backward, true_weight_gradients

ALL = ("x", "scores", "weights")


def step_shape(problem, max_rows, **options):
    return StepShape(
        max_rows, problem.dim, problem.expert_dim, problem.dtype, DEVICE,
        num_rows=problem.num_rows, **options,
    )  # fmt: skip


def poisoned_workspace(shape, grad_dtype):
    workspace = backward_workspace(shape, grad_dtype)
    for name, tensor in vars(workspace).items():
        if isinstance(tensor, torch.Tensor) and name != "ones_F":
            tensor.fill_(math.nan if tensor.is_floating_point() else 2**31 - 1)
    return workspace


def run(problem, max_rows, wanted=ALL, accumulates_onto=None, **options):
    """The gradients, those of weights in float32 and begun from NaN or added to a number."""
    sums = None
    if "weights" in wanted:
        begin = math.nan if accumulates_onto is None else accumulates_onto
        sums = problem.weights.map(lambda each: torch.full_like(each, begin, dtype=torch.float32))
    gradients = Gradients(
        torch.zeros_like(problem.x_TD) if "x" in wanted else None,
        torch.zeros_like(problem.scores_TK) if "scores" in wanted else None,
        sums,
        accumulate_weights=accumulates_onto is not None,
    )
    shape = step_shape(problem, max_rows, **options)
    workspace = poisoned_workspace(shape, torch.float32 if sums else None)
    backward_experts_(
        gradients, problem.dout_TD, problem.x_TD, problem.scores_TK, problem.rows_N,
        problem.segments, problem.weights, problem.activation, workspace,
    )  # fmt: skip
    return gradients


@pytest.mark.parametrize(
    ("dtype", "deterministic"), [(torch.float32, False), (torch.bfloat16, True)]
)
def test_the_fused_kernels_give_what_the_steps_give(dtype, deterministic):
    problem = Problem((5, 0, 1, 4, 0), 5, 2, 18, 12, dtype=dtype, has_biases=True)
    dh1, dh3, a, true_dscores_N = true_hidden_backward(problem)
    truths = true_weight_gradients(problem, dh1, dh3, a)
    # dh1, dh3 and a are rounded (cut off by the interpreter), then each of a token's parts.
    tolerance = 2e-6 if dtype == torch.float32 else 4 * 2**-7
    for kernels in ("triton", "torch"):
        actual = run(problem, 7, kernels=kernels, deterministic=deterministic)
        assert_close(actual.dx_TD, true_dx(problem, dh1, dh3), tolerance, "dx")
        is_row_N = ~true_dscores_N.isnan()
        dscores_N = actual.dscores_TK.view(-1)
        assert_close(dscores_N[is_row_N], true_dscores_N[is_row_N], tolerance, "dscores")
        assert not dscores_N[~is_row_N].any()
        for name, mine, truth in zip(
            ("dw1", "dw2", "dw3", "db1", "db2", "db3"), actual.weights.tensors(), truths,
            strict=True,
        ):  # fmt: skip
            assert_close(mine, truth, tolerance, name)


class Calls(TorchDispatchMode):
    """Which of our ops run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "relay_kernels":
            self.names.append(function.name().removeprefix("relay_kernels::"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("wanted", "ops"),
    [
        (("x",), ["hidden_backward_", "dx_scatter_"]),
        (("scores",), ["hidden_backward_"]),
        (("weights",), ["hidden_backward_", "weight_gradients_"]),
    ],
)
def test_what_nobody_asks_for_is_left_out(wanted, ops):
    problem = Problem((5, 2), 5, 2, 10, 9, has_biases=True)
    everything = run(problem, 100, kernels="triton")
    with Calls() as calls:
        alone = run(problem, 100, wanted, kernels="triton")
    assert calls.names == ops
    for name, field in (("x", "dx_TD"), ("scores", "dscores_TK")):
        if name in wanted:
            assert torch.equal(getattr(alone, field), getattr(everything, field))
    if "weights" in wanted:
        pairs = zip(alone.weights.tensors(), everything.weights.tensors(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_accumulating_adds_and_leaves_idle_experts_alone():
    problem = Problem((0, 6, 0, 3), 6, 2, 10, 9, has_biases=True)
    once = run(problem, 4, kernels="triton").weights
    on_top = run(problem, 4, accumulates_onto=1.0, kernels="triton").weights
    for total, single in zip(on_top.tensors(), once.tensors(), strict=True):
        torch.testing.assert_close(total, single + 1.0)
        assert not single[0].any()
        assert not single[2].any()


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_no_rows_at_all_give_zeros(kernels):
    gradients = run(Problem((0, 0), 1, 1, 5, 3, has_biases=True), 4, kernels=kernels)
    assert not any(tensor.any() for tensor in gradients.weights.tensors())
    assert not gradients.dx_TD.any()


def test_bits_do_not_depend_on_how_programs_share_the_tiles(monkeypatch):
    problem = Problem((5, 5), 5, 2, 18, 35, dtype=torch.bfloat16, has_biases=True)
    options = {"kernels": "triton", "deterministic": True}
    one = run(problem, 100, **options)
    from relay_kernels.triton import launch

    monkeypatch.setattr(launch, "_INTERPRETED_PROGRAMS", 5)
    other = run(problem, 100, **options)
    for name in ("dx_TD", "dscores_TK"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for mine, same in zip(one.weights.tensors(), other.weights.tensors(), strict=True):
        assert torch.equal(mine, same)


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_workspace_takes_the_bytes_it_says(deterministic, grad_dtype):
    shape = step_shape(Problem((3,), 3, 2, 5, 7), 11, kernels="triton", deterministic=deterministic)
    workspace = backward_workspace(shape, grad_dtype)
    tensors = [each for each in vars(workspace).values() if torch.is_tensor(each)]
    total = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert total == backward_workspace_bytes(shape, grad_dtype)
