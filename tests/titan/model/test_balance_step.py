"""Between backward and optimizer: loads are added up once and the biases follow them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.titan.tiny import apply_model, row_positions, tiny_config, tiny_model
from titan_relay.private_torch import end_process_groups
from titan_relay.titan.model.balance_hook import BalanceStep, moe_layers
from titan_relay.titan.model.finite import FiniteCheck, NonFiniteStepError

NUM_EXPERTS = 6
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    end_process_groups()


def step_of(model: nn.Module, num_copies: int = 1) -> BalanceStep:
    return BalanceStep(
        [model],
        check=FiniteCheck([model], num_layers=2, max_skipped=0, device=CPU),
        layer_ids=range(2),
        num_experts=NUM_EXPERTS,
        num_copies=num_copies,
        device=CPU,
    )


def train_rows(model: nn.Module, seed: int, num_pads: int = 0) -> list[list[int]]:
    """A forward and backward of new tokens; valid tokens of each expert, by layer."""
    chosen: list[torch.Tensor] = []

    def look(_: Any, __: Any, routing: Any) -> None:
        chosen.append(routing.expert_ids_BLK)

    hooks = [moe.router.register_forward_hook(look) for _, moe in moe_layers([model])]
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))
    apply_model(model, tokens, row_positions(2, 16, num_pads)).square().sum().backward()
    for hook in hooks:
        hook.remove()
    valid = [ids_BLK[:, : 16 - num_pads].flatten().tolist() for ids_BLK in chosen]
    return [[ids.count(expert) for expert in range(NUM_EXPERTS)] for ids in valid]


def moved(tokens: list[int], coeff: float) -> list[float]:
    """By how much: each expert with too few tokens up, with too many down, and none on average."""
    mean = sum(tokens) / len(tokens)
    steps = [(each < mean) - (each > mean) for each in tokens]
    return [coeff * (step - sum(steps) / len(steps)) for step in steps]


@pytest.mark.parametrize("coeff", [0.03, 0.5])
def test_biases_raise_experts_with_too_few_tokens_by_the_coefficient(coeff: float) -> None:
    model = tiny_model(tiny_config(load_balance_coeff=coeff))
    balance = step_of(model)
    expected = [[0.0] * NUM_EXPERTS] * 2
    for seed in range(2):  # the load of a step alone moves them, not that of the steps before
        loads = train_rows(model, seed)
        assert loads[0] != loads[1]
        balance()
        assert balance.stats.tokens_LE.tolist() == loads
        expected = [
            [old + change for old, change in zip(bias, moved(load, coeff), strict=True)]
            for bias, load in zip(expected, loads, strict=True)
        ]
        for (_, moe), bias in zip(moe_layers([model]), expected, strict=True):
            assert moe.expert_bias_E.tolist() == pytest.approx(bias, abs=1e-6)


def test_microbatches_are_added_and_copies_of_a_token_count_once() -> None:
    model = tiny_model(tiny_config(aux_loss_coeff=0.01, z_loss_coeff=0.1))
    first, second = train_rows(model, seed=1), train_rows(model, seed=2, num_pads=5)
    alone = step_of(model)
    layers = [moe for _, moe in moe_layers([model])]
    values_LV = torch.stack([moe.meter.read(CPU) for moe in layers])
    alone()
    for moe, values_V in zip(layers, values_LV, strict=True):
        moe.meter.record(2 * values_V)  # as if two ranks had counted each token
    twice = step_of(model, num_copies=2)
    twice()
    total = [
        [a + b for a, b in zip(*layer, strict=True)] for layer in zip(first, second, strict=True)
    ]
    for balance in (alone, twice):
        assert balance.stats.tokens_LE.tolist() == total
        assert balance.stats.aux_loss_L.tolist() == values_LV[:, NUM_EXPERTS].tolist()
        assert balance.stats.z_loss_L.tolist() == values_LV[:, NUM_EXPERTS + 1].tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_no_number_stops_the_step_unless_it_is_of_padding(value: float) -> None:
    for place, stops in ((3, True), (14, False)):
        model = tiny_model()
        balance = step_of(model)
        _, (_, second) = moe_layers([model])

        def spoil(_: Any, __: Any, logits_BLE: torch.Tensor, place: int = place) -> torch.Tensor:
            return logits_BLE.index_fill(1, torch.tensor([place]), value)

        hook = second.router.gate.register_forward_hook(spoil)
        train_rows(model, seed=1, num_pads=4)
        hook.remove()
        balance.step = 5
        if not stops:
            balance()
            continue
        with pytest.raises(NonFiniteStepError, match=r"step 5: .* in layer 1 \(2 tokens\)"):
            balance()
