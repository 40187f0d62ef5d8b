"""Initial weights: a function of seed, name and global index, with the right distribution."""

import pytest
import torch

from tests.titan.tiny import tiny_model
from titan_relay.titan.model import init
from titan_relay.titan.model.init import counter_normal, fill_normal, parameter_key


def test_distribution_is_normal() -> None:
    values = counter_normal(torch.arange(1_000_000), parameter_key(3, "w"), std=0.02).double()
    # 4 standard errors of the mean, the standard deviation and the fourth moment.
    assert abs(values.mean()) < 4 * 0.02 / 1000
    assert abs(values.std() / 0.02 - 1) < 4 / 2000**0.5 / 1000**0.5
    assert abs((values / 0.02).pow(4).mean() - 3) < 4 * 96**0.5 / 1000


def test_neighbouring_keys_and_indices_are_uncorrelated() -> None:
    index = torch.arange(100_000)
    a, b = (counter_normal(index, parameter_key(0, name), 1.0) for name in ("w.0", "w.1"))
    for x, y in [(a, b), (a[1:], a[:-1])]:
        assert abs((x * y).mean()) < 4 / len(x) ** 0.5


def test_a_part_has_the_values_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_CHUNK_ELEMENTS", 7)  # chunks that cut rows
    whole = torch.empty(5, 3, 4)
    fill_normal(whole, key=11, std=1.0)
    index = init._global_index(torch.arange(2 * 3 * 2), (2, 3, 2), (5, 3, 4), (2, 0, 1))
    part = counter_normal(index, 11, 1.0).view(2, 3, 2)
    assert torch.equal(part, whole[2:4, :, 1:3])


def test_no_two_experts_start_equal() -> None:
    model = tiny_model()
    for name, param in model.named_parameters():
        if "inner_experts" in name:
            flat = param.flatten(1)
            distance = torch.cdist(flat, flat) + torch.eye(len(flat))
            assert distance.min() > 0.1, name


def test_every_parameter_is_initialised_and_named_parameters_differ() -> None:
    a, b = tiny_model(seed=0), tiny_model(seed=1)
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.isfinite(x).all(), name
        assert "norm" in name or not torch.equal(x, y), name
    assert all(
        torch.equal(x, y)
        for x, y in zip(a.parameters(), tiny_model(seed=0).parameters(), strict=True)
    )
