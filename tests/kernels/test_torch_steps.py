"""The plain PyTorch steps against a row-by-row float64 reference, with poisoned buffers."""

import math

import pytest
import torch

from layer_check.dense_truth import relative_error
from relay_kernels import (
    ExpertWeights,
    Gradients,
    RoutedTokens,
    StepShape,
    SwiGLU,
    backward_experts_,
    forward_experts_,
)
from relay_kernels.workspace import BackwardWorkspace, ForwardWorkspace, workspace_bytes
from tests.kernels.problem import poisoned, storage_bytes
from tests.kernels.reference import expert_rows
from titan_relay.measure import LiveBytes

T, K, D, F, G = 7, 2, 5, 3, 4
# Rows by expert: uneven, empty, one row, many.
ROWS = torch.tensor([2, 7, 13, 0, 5, 8, 10, 12, 1], dtype=torch.int32)
SEGMENTS = [(0, 3), (3, 3), (3, 4), (4, 9)]
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def problem(dtype, has_biases):
    random = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=random).to(dtype)

    tensors = [normal(G, F, D), normal(G, D, F), normal(G, F, D)]
    if has_biases:
        tensors += [normal(G, F), normal(G, D), normal(G, F)]
    tokens = RoutedTokens(normal(T, D), torch.rand(T, K, generator=random), ROWS, SEGMENTS)
    return tokens, normal(T, D), ExpertWeights(*tensors)


def truth(tokens, dout_TD, weights, activation):
    leaves = [
        tensor.double().clone().requires_grad_()
        for tensor in (tokens.x_TD, tokens.scores_TK, *weights.tensors())
    ]
    x, scores, *rest = leaves
    out = torch.zeros(T, D, dtype=torch.float64)
    exact = RoutedTokens(x, scores, ROWS, SEGMENTS)
    out = expert_rows(out, exact, ExpertWeights(*rest), activation)
    out.backward(dout_TD.double())
    return out.detach(), [leaf.grad for leaf in leaves]


def nan_(tensor):
    return tensor.fill_(math.nan)


# A 16-bit product that is rounded to the limit or away from it has another gradient than the true
# one, as in PyTorch's own operators: there the clamps are left out.
CASES = [(dtype, SwiGLU()) for dtype in TOLERANCE]
CASES += [(dtype, SwiGLU(1.702, 0.7, 1.0)) for dtype in (torch.float64, torch.float32)]


@pytest.mark.parametrize("max_rows", [1, 2, 100])
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize(("dtype", "activation"), CASES)
def test_forward_and_backward(dtype, activation, has_biases, max_rows):
    tokens, dout_TD, weights = problem(dtype, has_biases)
    expected_out, expected = truth(tokens, dout_TD, weights, activation)
    shape = StepShape(max_rows, D, F, dtype, dout_TD.device)

    out_TD = torch.zeros(T, D, dtype=dtype)
    forward_experts_(out_TD, tokens, weights, activation, poisoned(ForwardWorkspace(shape)))
    assert relative_error(out_TD, expected_out) < TOLERANCE[dtype]

    sum_dtype = torch.promote_types(dtype, torch.float32)
    workspace = poisoned(BackwardWorkspace(shape, sum_dtype))
    gradients = Gradients(
        torch.zeros(T, D, dtype=dtype),
        torch.zeros(T, K),
        weights.empty_like(G, sum_dtype).map(nan_),
    )
    backward_experts_(gradients, dout_TD, tokens, weights, activation, workspace)
    actual = [gradients.dx_TD, gradients.dscores_TK, *gradients.weights.tensors()]
    for index, (mine, wanted) in enumerate(zip(actual, expected, strict=True)):
        tolerance = TOLERANCE[dtype] if index != 1 else max(TOLERANCE[dtype], 1e-6)
        assert relative_error(mine, wanted) < tolerance, index


def test_accumulating_weight_gradients_adds_and_leaves_idle_experts_alone():
    tokens, dout_TD, weights = problem(torch.float64, False)
    workspace = BackwardWorkspace(StepShape(2, D, F, torch.float64, dout_TD.device), torch.float64)
    sums = weights.empty_like(G).map(lambda tensor: tensor.fill_(1.0))
    args = (dout_TD, tokens, weights, SwiGLU(), workspace)
    backward_experts_(Gradients(None, None, sums, accumulate_weights=True), *args)
    fresh = weights.empty_like(G).map(nan_)
    backward_experts_(Gradients(None, None, fresh), *args)
    for total, once in zip(sums.tensors(), fresh.tensors(), strict=True):
        torch.testing.assert_close(total, once + 1.0)
    assert not fresh.w1_gFD[1].any()


@pytest.mark.parametrize("wanted", ["x", "scores", "weights"])
def test_each_gradient_alone_equals_all_together(wanted):
    tokens, dout_TD, weights = problem(torch.float64, True)
    workspace = BackwardWorkspace(StepShape(2, D, F, torch.float64, dout_TD.device), torch.float64)

    def run(names):
        gradients = Gradients(
            torch.zeros(T, D, dtype=torch.float64) if "x" in names else None,
            torch.zeros(T, K) if "scores" in names else None,
            weights.empty_like(G) if "weights" in names else None,
        )
        args = (dout_TD, tokens, weights, SwiGLU(), workspace)
        backward_experts_(gradients, *args)
        return {
            "x": [gradients.dx_TD],
            "scores": [gradients.dscores_TK],
            "weights": gradients.weights.tensors() if gradients.weights else [],
        }

    for mine, full in zip(
        run([wanted])[wanted], run(["x", "scores", "weights"])[wanted], strict=True
    ):
        assert torch.equal(mine, full)


@pytest.mark.parametrize(
    ("dtype", "sum_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
def test_workspaces_take_the_bytes_they_say(dtype, sum_dtype):
    shape = StepShape(13, D, F, dtype, torch.device("cpu"))
    assert storage_bytes(ForwardWorkspace(shape)) == workspace_bytes(ForwardWorkspace, shape)
    backward = BackwardWorkspace(shape, sum_dtype)
    assert storage_bytes(backward) == workspace_bytes(BackwardWorkspace, shape, sum_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clamped_activation_takes_no_more_than_the_workspace(dtype):
    tokens, dout_TD, weights = problem(dtype, has_biases=False)
    shape = StepShape(5, D, F, dtype, dout_TD.device)
    gradients = Gradients(None, torch.zeros(T, K), None)
    with LiveBytes() as tracker:
        workspace = BackwardWorkspace(shape, dtype)
        activation = SwiGLU(1.702, 0.7, 1.0)
        backward_experts_(gradients, dout_TD, tokens, weights, activation, workspace)
    assert tracker.peak_bytes == workspace_bytes(BackwardWorkspace, shape, dtype)


@pytest.mark.parametrize("name", ["max_rows", "dim", "expert_dim"])
def test_a_step_of_nothing_is_refused(name):
    sizes = {"max_rows": 1, "dim": 1, "expert_dim": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} = 0 must be at least 1"):
        StepShape(**sizes, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("wrong", [{"alpha": 0.0}, {"limit": -1.0}])
def test_activation_refuses_impossible_numbers(wrong):
    with pytest.raises(ValueError, match="must be greater than 0"):
        SwiGLU(**wrong)
