"""The router, against its definition token by token in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from tests.titan.tiny import tiny_config
from titan_relay.titan.model.families.parts import router
from titan_relay.titan.model.router import Router

NUM_EXPERTS, TOP_K, DIM = 6, 2, 32
# Moves the choice of every token, and would be seen at once in a weight.
BIAS = torch.tensor([0.0, 0.7, -0.4, 0.0, 1.1, 0.3])


@dataclass(frozen=True)
class Kind:
    """How scores are made of logits."""

    score_func: Literal["softmax", "sigmoid"]
    route_norm: bool
    route_scale: float = 1.0


KINDS = [
    Kind("softmax", route_norm=True),
    Kind("softmax", route_norm=False, route_scale=2.5),
    Kind("sigmoid", route_norm=True, route_scale=2.5),
    Kind("sigmoid", route_norm=False),
]


def of_kind(kind: Kind) -> Router:
    model = tiny_config(**vars(kind), num_experts=NUM_EXPERTS, top_k=TOP_K)
    built = router(model).build()
    with torch.no_grad():
        built.gate.weight.copy_(_randn(NUM_EXPERTS, DIM, seed=1))
    return built


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bias_E", [None, BIAS], ids=["no bias", "bias"])
def test_scores_are_of_the_logits_and_the_choice_of_the_bias_too(
    kind: Kind, bias_E: torch.Tensor | None
) -> None:
    x_BLD = _randn(2, 9, DIM, seed=2) / DIM**0.5
    built = of_kind(kind)
    with torch.no_grad():
        routing = built(x_BLD, bias_E)
    for row in range(2):
        for token in range(9):
            logits_E = built.gate.weight.detach().double() @ x_BLD[row, token].double()
            if kind.score_func == "softmax":
                probs_E = logits_E.exp() / logits_E.exp().sum()
            else:
                probs_E = 1 / (1 + (-logits_E).exp())
            wanted_E = probs_E if bias_E is None else probs_E + bias_E
            chosen = sorted(range(NUM_EXPERTS), key=lambda e: -float(wanted_E[e]))[:TOP_K]
            weights = {e: float(probs_E[e]) for e in chosen}
            if kind.route_norm:
                weights = {e: each / sum(weights.values()) for e, each in weights.items()}
            weights = {e: each * kind.route_scale for e, each in weights.items()}
            ids, scores = (
                each[row, token].tolist() for each in (routing.expert_ids_BLK, routing.scores_BLK)
            )
            assert dict(zip(ids, scores, strict=True)) == pytest.approx(weights, rel=1e-5)
            # What balancing losses look at: before bias, norm and scale.
            torch.testing.assert_close(
                routing.probs_BLE[row, token].double(), probs_E, rtol=1e-5, atol=0
            )
            torch.testing.assert_close(
                routing.logits_BLE[row, token].double(), logits_E, rtol=1e-5, atol=1e-6
            )


def test_logits_are_computed_in_float32_from_bfloat16() -> None:
    built = of_kind(KINDS[0]).bfloat16()
    x_BLD = _randn(1, 50, DIM, seed=3).bfloat16()
    expected = x_BLD.double() @ built.gate.weight.double().T
    # Bfloat16 has 8 bits: a product or sum rounded to it would be off by up to 4e-3.
    torch.testing.assert_close(built(x_BLD).logits_BLE.double(), expected, rtol=1e-5, atol=1e-5)
