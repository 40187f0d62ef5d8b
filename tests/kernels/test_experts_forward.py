"""``forward_experts_`` by either implementation, what it touches, and the choice between them."""

import math

import pytest
import torch

from relay_kernels import (
    KernelChoiceError,
    StepShape,
    SwiGLU,
    forward_experts_,
    forward_workspace,
    forward_workspace_bytes,
)
from relay_kernels.choice import uses_triton, why_not_interpreted
from tests.kernels.problem import (
    DEVICE,
    ROUNDING,
    Problem,
    assert_close,
    poisoned,
    storage_bytes,
    with_more_programs,
)

# An implementation, and whether its sums have a fixed order: PyTorch's always have.
IMPLEMENTATIONS = pytest.mark.parametrize(
    ("kernels", "deterministic"), [("triton", False), ("triton", True), ("torch", False)]
)


def step_shape(problem, max_rows, **options):
    return StepShape(
        max_rows, problem.dim, problem.expert_dim, problem.dtype, DEVICE,
        num_rows=problem.num_rows, **options,
    )  # fmt: skip


def run(problem, max_rows, **options):
    workspace = poisoned(forward_workspace(step_shape(problem, max_rows, **options)))
    out_TD = torch.zeros_like(problem.x_TD)
    forward_experts_(out_TD, problem.tokens, problem.weights, problem.activation, workspace)
    return out_TD


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_gives_the_true_output(dtype, kernels, deterministic):
    problem = Problem((9, 0, 1, 6), 9, 2, 18, 17, dtype=dtype, has_biases=True)
    truth = problem.true_out(problem.true_hidden())
    # a is rounded to bfloat16, then each of a token's parts as it is added.
    tolerance = 1e-6 if dtype == torch.float32 else 4 * ROUNDING[dtype]
    actual = run(problem, 7, kernels=kernels, deterministic=deterministic)
    assert_close(actual, truth, tolerance, "out")


@IMPLEMENTATIONS
def test_tokens_without_rows_are_neither_read_nor_written(kernels, deterministic):
    problem = Problem((3, 2), 7, 1, 9, 5)
    routed = problem.rows_N[3:-3].long()
    idle = [token for token in range(7) if token not in routed.tolist()]
    assert idle
    problem.x_TD[idle] = math.nan
    problem.scores_TK[idle] = math.nan
    out_TD = run(problem, 100, kernels=kernels, deterministic=deterministic)
    assert not out_TD[idle].any()
    assert out_TD[routed].isfinite().all()


@IMPLEMENTATIONS
def test_three_calls_over_dirty_memory_stay_clean(kernels, deterministic):
    # 12 rows of 16, and four more past the last segment: a grouped product leaves those unwritten,
    # and what a dirty allocator had there returns in the next step.
    problem = Problem((4, 0, 4), 12, 1, 16, 16, margin=4)
    truth = problem.true_out(problem.true_hidden())
    for _ in range(3):
        out_TD = run(problem, 12, kernels=kernels, deterministic=deterministic)
        torch.testing.assert_close(out_TD.double(), truth, rtol=1e-5, atol=1e-5)


@IMPLEMENTATIONS
def test_a_nan_is_not_hidden_by_the_clamps(kernels, deterministic):
    activation = SwiGLU(alpha=1.702, limit=0.7, up_offset=1.0)
    problem = Problem((2,), 2, 1, 4, 4, activation=activation)
    problem.x_TD[0] = math.nan
    out_TD = run(problem, 2, kernels=kernels, deterministic=deterministic)
    assert out_TD[0].isnan().all()
    assert out_TD[1].isfinite().all()


@IMPLEMENTATIONS
def test_no_rows_at_all_do_nothing(kernels, deterministic):
    problem = Problem((0, 0), 4, 1, 8, 8)
    assert not run(problem, 2, kernels=kernels, deterministic=deterministic).any()


def test_deterministic_sums_do_not_depend_on_how_programs_share_the_tiles():
    problem = Problem((9, 9, 9), 9, 3, 18, 17, dtype=torch.bfloat16)
    options = {"kernels": "triton", "deterministic": True}
    one = run(problem, 100, **options)
    with with_more_programs(problem, "up_gate", "down"):
        assert torch.equal(run(problem, 100, **options), one)


@IMPLEMENTATIONS
def test_the_workspace_takes_the_bytes_it_says(kernels, deterministic):
    problem = Problem((3,), 3, 2, 5, 7)
    shape = step_shape(problem, 11, kernels=kernels, deterministic=deterministic)
    assert storage_bytes(forward_workspace(shape)) == forward_workspace_bytes(shape)


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
    ("triton", "numpy", "fits"),
    [((3, 6), (2, 4), False), ((3, 6), (2, 3), True), ((3, 9), (2, 4), True)],
)
def test_an_interpreter_that_its_numpy_is_too_new_for_is_told(triton, numpy, fits):
    reason = why_not_interpreted(triton, numpy)
    assert reason == ("" if fits else "the interpreter of triton 3.6 needs numpy older than 2.4")
