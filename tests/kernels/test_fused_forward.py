"""``forward_experts_`` by the fused kernels: chunks, workspaces, and the choice of them."""

import importlib
import math

import pytest
import torch

from relay_kernels import (
    KernelChoiceError,
    StepShape,
    forward_experts_,
    forward_workspace,
    forward_workspace_bytes,
)
from relay_kernels.choice import _why_not_interpreted, uses_triton
from tests.kernels.problem import DEVICE, ROUNDING, Problem, assert_close


def step_shape(problem, max_rows, **options):
    return StepShape(
        max_rows, problem.dim, problem.expert_dim, problem.dtype, DEVICE,
        num_rows=problem.num_rows, **options,
    )  # fmt: skip


def poisoned_workspace(shape):
    workspace = forward_workspace(shape)
    for tensor in vars(workspace).values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(math.nan if tensor.is_floating_point() else 2**31 - 1)
    return workspace


def run(problem, max_rows, **options):
    workspace = poisoned_workspace(step_shape(problem, max_rows, **options))
    out_TD = torch.zeros_like(problem.x_TD)
    forward_experts_(
        out_TD, problem.x_TD, problem.scores_TK, problem.rows_N, problem.segments,
        problem.weights, problem.activation, workspace,
    )  # fmt: skip
    return out_TD


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernels_give_what_the_steps_give(dtype, deterministic):
    problem = Problem((9, 0, 1, 6), 9, 2, 18, 17, dtype=dtype, has_biases=True)
    truth = problem.true_out(problem.true_hidden())
    # a is rounded to bfloat16, then each of a token's parts as it is added.
    tolerance = 1e-6 if dtype == torch.float32 else 4 * ROUNDING[dtype]
    for kernels in ("triton", "torch"):
        options = {"kernels": kernels, "deterministic": deterministic}
        assert_close(run(problem, 7, **options), truth, tolerance, kernels)


def test_deterministic_sums_do_not_depend_on_how_programs_share_the_tiles(monkeypatch):
    problem = Problem((9, 9, 9), 9, 3, 18, 17, dtype=torch.bfloat16)
    options = {"kernels": "triton", "deterministic": True}
    one = run(problem, 100, **options)
    from relay_kernels.triton import launch

    monkeypatch.setattr(launch, "_INTERPRETED_PROGRAMS", 5)
    assert torch.equal(run(problem, 100, **options), one)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_workspace_takes_the_bytes_it_says(deterministic):
    shape = step_shape(Problem((3,), 3, 2, 5, 7), 11, kernels="triton", deterministic=deterministic)
    tensors = [each for each in vars(forward_workspace(shape)).values() if torch.is_tensor(each)]
    total = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert total == forward_workspace_bytes(shape)


CPU = torch.device("cpu")


def test_automatic_choice_is_pytorch_on_a_cpu():
    assert not uses_triton("auto", CPU, torch.float32)


@pytest.mark.parametrize(
    ("kernels", "dtype", "interpreted", "message"),
    [
        ("triton", torch.float32, "0", "the tensors are on cpu, and it runs on CUDA devices"),
        ("triton", torch.float64, "1", "it does not compute in torch.float64"),
        ("cuda", torch.float32, "1", "'cuda' must be one of auto, triton, torch"),
    ],
)
def test_a_choice_that_cannot_run_is_one_clear_line(
    kernels, dtype, interpreted, message, monkeypatch
):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    with pytest.raises(KernelChoiceError, match=message) as caught:
        uses_triton(kernels, CPU, dtype)
    assert "\n" not in str(caught.value)


def test_a_plan_for_a_device_that_is_not_here_counts_on_the_fused_kernels():
    if not torch.cuda.is_available():
        assert uses_triton("auto", torch.device("cuda"), torch.bfloat16)
    assert not uses_triton("auto", torch.device("cuda"), torch.float64)


@pytest.mark.parametrize(
    ("versions", "fits"),
    [(("3.6.0", "2.4.1"), False), (("3.6.0", "2.3.5"), True), (("3.9.0", "2.4.6"), True)],
)
def test_an_interpreter_that_its_numpy_is_too_new_for_is_told(monkeypatch, versions, fits):
    for package, version in zip(("triton", "numpy"), versions, strict=True):
        monkeypatch.setattr(importlib.import_module(package), "__version__", version)
    reason = _why_not_interpreted.__wrapped__()
    assert reason == ("" if fits else "the interpreter of triton 3.6 needs numpy older than 2.4")
