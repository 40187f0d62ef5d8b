"""Run the relay on this rank and compare everything with the dense reference."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tests.support.dense_reference import expected_results, relative_error
from tests.support.moe_cases import MoeCase
from titan_relay.moe import ExpertBiases, RelayOptions, SwiGLU, relay_moe

# Float32 has a relative precision of 6e-8. Errors of sums over D, F and K terms grow with the
# square root of their number, so a few times that for the sizes here; seen: at most 5e-7.
FLOAT32_TOLERANCE = 1e-6
PLAIN = SwiGLU()


def local_weights(case: MoeCase, rank: int) -> list[torch.Tensor]:
    """This rank's consecutive experts, as leaves."""
    per_rank = case.num_experts // case.num_ranks
    first = rank * per_rank
    return [tensor[first : first + per_rank].clone().requires_grad_() for tensor in case.weights()]


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
    biases = ExpertBiases(*weights[3:]) if case.has_biases else None
    out_TD = relay_moe(
        x_TD,
        scores_TK,
        data.ids_TK,
        *weights[:3],
        group,
        options,
        biases=biases,
        activation=activation,
    )
    out_TD.backward(data.dout_TD)
    named = dict(zip(("w1", "w2", "w3", "b1", "b2", "b3"), weights, strict=False))
    results = {"out": out_TD.detach(), "dx": x_TD.grad, "dscores": scores_TK.grad}
    results |= {f"d{name}": weight.grad for name, weight in named.items()}
    missing = [name for name, value in results.items() if value is None]
    assert not missing, f"no gradient: {missing}"
    return results


def errors_against_reference(
    case: MoeCase,
    group: dist.ProcessGroup | None,
    options: RelayOptions,
    activation: SwiGLU = PLAIN,
) -> dict[str, float]:
    """Relative error of every result of this rank."""
    rank = 0 if group is None else dist.get_rank(group)
    layer = case.dense_layer()
    layer.alpha, layer.limit = activation.alpha, activation.limit
    layer.up_offset = activation.up_offset
    expected = expected_results(layer, [case.data(r) for r in range(case.num_ranks)])
    per_rank = case.num_experts // case.num_ranks
    first = rank * per_rank
    wanted: Sequence[torch.Tensor] = [
        expected.out[rank],
        expected.dx[rank],
        expected.dscores[rank],
        *(tensor[first : first + per_rank] for tensor in expected.dweights),
    ]
    results = run_relay(case, group, options, activation)
    return {
        name: relative_error(actual, value)
        for (name, actual), value in zip(results.items(), wanted, strict=True)
    }


def check_case(
    case: MoeCase,
    group: dist.ProcessGroup | None,
    options: RelayOptions,
    activation: SwiGLU = PLAIN,
    tolerance: float = FLOAT32_TOLERANCE,
) -> None:
    errors = errors_against_reference(case, group, options, activation)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < tolerance, f"{case} {options}: {worst} is off by {errors[worst]:.2e}"
