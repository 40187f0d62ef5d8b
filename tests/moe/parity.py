"""Run the relay on this rank and compare everything with the dense reference."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from layer_check.dense_truth import relative_error, share_of
from tests.support.moe_cases import PLAIN, MoeCase
from titan_relay.moe import ExpertWeights, RelayOptions, SwiGLU, relay_moe

# Float32 has a relative precision of 6e-8. Errors of sums over D, F and K terms grow with the
# square root of their number, so a few times that for the sizes here; seen: at most 5e-7.
FLOAT32_TOLERANCE = 1e-6
RESULTS = ("out", "dx", "dscores", "dw1", "dw2", "dw3", "db1", "db2", "db3")
AUTO = RelayOptions()


def local_weights(case: MoeCase, rank: int) -> list[torch.Tensor]:
    """This rank's consecutive experts, as leaves."""
    mine = share_of(case.weights(), rank, case.num_ranks)
    return [tensor.clone().requires_grad_() for tensor in mine]


def call_relay(
    inputs: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    options: RelayOptions = AUTO,
    activation: SwiGLU = PLAIN,
) -> torch.Tensor:
    """``relay_moe`` of x, scores and ids, and of the tensors of the weights."""
    x_TD, scores_TK, ids_TK, *weights = inputs
    experts = ExpertWeights(*weights)
    return relay_moe(x_TD, scores_TK, ids_TK, experts, group, options, activation)


def run_relay(
    case: MoeCase,
    group: dist.ProcessGroup | None,
    options: RelayOptions,
    activation: SwiGLU = PLAIN,
) -> dict[str, torch.Tensor]:
    """Forward and backward on this rank: ``out``, ``dx``, ``dscores``, ``dw1`` and so on."""
    rank = 0 if group is None else dist.get_rank(group)
    data = case.data(rank)
    weights = local_weights(case, rank)
    x_TD = data.x_TD.clone().requires_grad_()
    scores_TK = data.scores_TK.clone().requires_grad_()
    out_TD = call_relay([x_TD, scores_TK, data.ids_TK, *weights], group, options, activation)
    out_TD.backward(data.dout_TD)
    tensors = [out_TD.detach(), *(leaf.grad for leaf in (x_TD, scores_TK, *weights))]
    results = dict(zip(RESULTS, tensors, strict=False))
    missing = [name for name, value in results.items() if value is None]
    assert not missing, f"no gradient: {missing}"
    return results


def errors_against_truth(
    group: dist.ProcessGroup | None,
    case: MoeCase,
    options: RelayOptions,
    activation: SwiGLU = PLAIN,
) -> dict[str, float]:
    """Relative error of every result of this rank."""
    rank = 0 if group is None else dist.get_rank(group)
    wanted = case.expected(activation).of_rank(rank, case.num_ranks)
    return relative_errors(list(run_relay(case, group, options, activation).values()), wanted)


def relative_errors(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> dict[str, float]:
    """By the results' names."""
    errors = [relative_error(*pair) for pair in zip(actual, wanted, strict=True)]
    return dict(zip(RESULTS, errors, strict=False))


def check_case(
    case: MoeCase,
    group: dist.ProcessGroup | None,
    options: RelayOptions,
    activation: SwiGLU = PLAIN,
    tolerance: float = FLOAT32_TOLERANCE,
) -> None:
    errors = errors_against_truth(group, case, options, activation)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < tolerance, f"{case} {options}: {worst} is off by {errors[worst]:.2e}"
