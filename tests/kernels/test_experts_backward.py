"""``backward_experts_`` by either implementation: what it gives, leaves out and touches."""

import math

import pytest
import torch

from relay_kernels import (
    Gradients,
    StepShape,
    backward_experts_,
    backward_workspace,
    backward_workspace_bytes,
)
from tests.kernels.problem import (
    DEVICE,
    Problem,
    assert_close,
    poisoned,
    storage_bytes,
    with_more_programs,
)
from tests.kernels.true_backward import true_dx, true_hidden_backward, true_weight_gradients

ALL, HIDDEN = ("x", "scores", "weights"), ("dh1_RF", "dh3_RF", "a_RF")


def step_shape(problem, max_rows, **options):
    return StepShape(
        max_rows, problem.dim, problem.expert_dim, problem.dtype, DEVICE,
        num_rows=problem.num_rows, **options,
    )  # fmt: skip


def run(problem, max_rows, wanted=ALL, accumulates_onto=None, **options):
    """The gradients, those of weights in float32 and begun from NaN or added to a number."""
    return run_in(
        poisoned_workspace(problem, max_rows, **options), problem, wanted, accumulates_onto
    )


def poisoned_workspace(problem, max_rows, **options):
    shape = step_shape(problem, max_rows, **options)
    return poisoned(backward_workspace(shape, torch.float32))


def run_in(workspace, problem, wanted=ALL, accumulates_onto=None):
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
    backward_experts_(
        gradients, problem.dout_TD, problem.tokens, problem.weights, problem.activation, workspace
    )
    return gradients


IMPLEMENTATIONS = pytest.mark.parametrize("kernels", ["triton", "torch"])


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("dtype", "deterministic"), [(torch.float32, False), (torch.bfloat16, True)]
)
def test_it_gives_the_true_gradients(dtype, deterministic, kernels):
    problem = Problem((5, 0, 1, 4, 0), 5, 2, 18, 12, dtype=dtype, has_biases=True)
    dh1, dh3, a, true_dscores_N = true_hidden_backward(problem)
    truths = true_weight_gradients(problem, dh1, dh3, a)
    # dh1, dh3 and a are rounded (cut off by the interpreter), then each of a token's parts.
    tolerance = 2e-6 if dtype == torch.float32 else 4 * 2**-7
    actual = run(problem, 7, kernels=kernels, deterministic=deterministic)
    assert_close(actual.dx_TD, true_dx(problem, dh1, dh3), tolerance, "dx")
    is_row_N = ~true_dscores_N.isnan()
    dscores_N = actual.dscores_TK.view(-1)
    assert_close(dscores_N[is_row_N], true_dscores_N[is_row_N], tolerance, "dscores")
    assert not dscores_N[~is_row_N].any()
    names = ("dw1", "dw2", "dw3", "db1", "db2", "db3")
    for name, mine, truth in zip(names, actual.weights.tensors(), truths, strict=True):
        assert_close(mine, truth, tolerance, name)


@IMPLEMENTATIONS
def test_tokens_without_rows_are_neither_read_nor_written(kernels):
    problem = Problem((3, 2), 7, 1, 9, 5, has_biases=True)
    routed = problem.rows_N[3:-3].long()
    idle = [token for token in range(7) if token not in routed.tolist()]
    assert idle
    for tensor in (problem.x_TD, problem.dout_TD, problem.scores_TK):
        tensor[idle] = math.nan
    actual = run(problem, 100, kernels=kernels)
    for tensor in (actual.dx_TD, actual.dscores_TK):
        assert not tensor[idle].any()
        assert tensor[routed].isfinite().all()
    assert all(tensor.isfinite().all() for tensor in actual.weights.tensors())


@IMPLEMENTATIONS
def test_three_calls_over_dirty_memory_stay_clean(kernels):
    # 12 rows of 16, and four more past the last segment: a grouped product leaves those unwritten,
    # and what a dirty allocator had there returns in the next step.
    problem = Problem((4, 0, 4), 12, 1, 16, 16, margin=4)
    dh1, dh3, _, _ = true_hidden_backward(problem)
    truth = true_dx(problem, dh1, dh3)
    for _ in range(3):
        actual = run(problem, 12, kernels=kernels)
        torch.testing.assert_close(actual.dx_TD.double(), truth, rtol=1e-5, atol=1e-5)
        assert not any(tensor[1].any() for tensor in actual.weights.tensors())


# What a call writes of its workspace shows what it computed: the rest is as poisoned as before.
@pytest.mark.parametrize(
    ("wanted", "written"),
    [(("x",), {"dh1_RF", "dh3_RF"}), (("scores",), set()), (("weights",), set(HIDDEN))],
)
def test_what_nobody_asks_for_is_left_out(wanted, written):
    problem = Problem((5, 2), 5, 2, 10, 9, has_biases=True)
    everything = run(problem, 100, kernels="triton")
    workspace = poisoned_workspace(problem, 100, kernels="triton")
    alone = run_in(workspace, problem, wanted)
    assert {name for name in HIDDEN if not getattr(workspace.hidden, name).isnan().all()} == written
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


@IMPLEMENTATIONS
def test_no_rows_at_all_give_zeros(kernels):
    gradients = run(Problem((0, 0), 1, 1, 5, 3, has_biases=True), 4, kernels=kernels)
    assert not any(tensor.any() for tensor in gradients.weights.tensors())
    assert not gradients.dx_TD.any()


def test_bits_do_not_depend_on_how_programs_share_the_tiles():
    problem = Problem((5, 5), 5, 2, 18, 35, dtype=torch.bfloat16, has_biases=True)
    options = {"kernels": "triton", "deterministic": True}
    one = run(problem, 100, **options)
    with with_more_programs(problem, "score_gradients", "dw13", "dw2", "bias_gradient"):
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
    assert storage_bytes(workspace) == backward_workspace_bytes(shape, grad_dtype)
