"""Initial weights: a function of seed, name and global index, with the right distribution."""

from pathlib import Path

import pytest
import torch

from tests.titan.hf.cases import CASES
from tests.titan.runs import Run, config_file, load_run
from tests.titan.tiny import tiny_model
from titan_relay.titan.model.families import FAMILIES, build_model_config
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_has_the_spread_and_every_norm_the_epsilon_of_the_configuration(
    family: str, tied: bool, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.family == family)
    keys = case.model | {"init_std": 0.06, "norm_eps": 0.25, "num_layers": 3}
    keys |= {"tie_word_embeddings": tied}
    run = Run("init", tuple((f"model.{key}", value) for key, value in keys.items()))
    model = build_model_config(load_run(config_file(tmp_path).parent, run).model, seed=0, cpu=True)
    built = model.build()
    with torch.no_grad():
        built.init_weights()
    for name, param in built.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert torch.equal(param, torch.full_like(param, "norm.w" in name)), name
            continue
        # Outputs into the residual stream, two for each of three layers, start smaller.
        is_output = name.endswith((".wo.weight", ".w2.weight", ".w2_EDF"))
        std = 0.06 / 6**0.5 if is_output else 0.06
        assert float(param.detach().std()) == pytest.approx(
            std, rel=4 / (2 * param.numel()) ** 0.5
        ), name
    norms = {name: part.eps for name, part in built.named_modules() if hasattr(part, "eps")}
    assert len(norms) >= 2 * 3 + 1
    latent = {name for name in norms if name.endswith((".q_norm", ".kv_norm"))}
    if family != "mla_moe":
        latent = set()  # transformers has a constant there
    assert {norms[name] for name in norms.keys() - latent} == {0.25}
