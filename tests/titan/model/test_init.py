"""Initial weights: a function of seed, name and global index, with the right distribution."""

import torch

from tests.titan.tiny import tiny_model
from titan_relay.titan.model.init import (
    counter_normal,
    fill_normal,
    global_index,
    parameter_key,
)


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


def test_a_part_has_the_values_of_the_whole() -> None:
    whole = torch.empty(5, 999, 1001)  # more than is computed at a time, which cuts rows
    fill_normal(whole, key=11, std=1.0)
    local_shape, offset = (2, 333, 77), (3, 666, 700)
    index = global_index(torch.arange(2 * 333 * 77), local_shape, tuple(whole.shape), offset)
    part = counter_normal(index, 11, 1.0).view(local_shape)
    assert torch.equal(part, whole[3:5, 666:999, 700:777])


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
