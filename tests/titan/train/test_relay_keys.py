"""Keys of `[relay]`: from the file to the layers' options."""

import logging
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch

from relay_kernels import KERNELS
from titan_relay.config import ConfigError, load_config, with_settings
from titan_relay.config.fields import choices_of
from titan_relay.config.schema_relay import RelayKeys
from titan_relay.titan.preflight.device import check_device
from titan_relay.titan.preflight.summary import summary_lines
from titan_relay.titan.train.relay_setup import (
    expected_relay,
    relay_options,
    unused_keys,
    warm_up_kernels,
)


def load(*arguments):
    return load_config(["--config", "train_configs/demo.toml", *arguments])


@pytest.mark.parametrize(
    ("arguments", "kernels", "deterministic"),
    [
        ([], "auto", False),
        (["--relay.kernels", "torch", "--relay.deterministic", "true"], "torch", True),
        (["--debug.deterministic", "true"], "auto", True),
    ],
)
def test_keys_become_options(arguments, kernels, deterministic):
    options = relay_options(load(*arguments).config)
    assert (options.kernels, options.deterministic) == (kernels, deterministic)


@pytest.mark.parametrize("key", [each.name for each in fields(RelayKeys)])
def test_every_key_reaches_the_layers(key):
    other = {
        "circulate": "tokens",
        "max_imbalance": 1.5,
        "num_slices": 3,
        "max_rows_per_step": 7,
        "max_tokens_per_rank": 9999,
        "grad_dtype": "bfloat16",
        "kernels": "torch",
        "deterministic": True,
    }[key]
    run = load().config
    run = with_settings(run, {"relay.circulate": "auto", f"relay.{key}": other})
    assert getattr(relay_options(run), key) == other


def test_kernels_have_the_same_names_in_runs_and_in_relay_kernels():
    assert choices_of(get_type_hints(RelayKeys)["kernels"]) == KERNELS


def test_a_limit_to_imbalance_reaches_the_layers_and_the_plan():
    # Wide experts and few tokens, so that tokens circulate.
    few = ["--training.seq_len", "64", "--relay.circulate", "auto"]
    run = load(*few, "--relay.max_imbalance", "1.25").config
    assert relay_options(run).max_imbalance == 1.25
    plan = expected_relay(run, 4, for_cpu=True)
    assert plan is not None
    forward, _ = plan.directions["forward"]
    assert forward.circulate == "tokens"
    assert plan.may_turn(forward)
    words = "tokens circulate (experts, where the routing would let a rank compute more than 1.25 "
    assert words in plan.lines()[0]
    without = expected_relay(load(*few).config, 4, for_cpu=True)
    assert without is not None
    assert not without.may_turn(without.directions["forward"][0])
    assert "(experts" not in without.lines()[0]


@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        ([], []),
        (
            ["--relay.dispatcher", "alltoall", "--relay.num_slices", "3"],
            ["relay.circulate", "relay.num_slices"],
        ),
        (["--parallelism.expert_parallel_degree", "1"], ["relay.circulate"]),
    ],
)
def test_keys_without_effect_are_said_at_the_start(arguments, unused):
    run = load(*arguments).config
    assert unused_keys(run, 4) == unused
    said = [line for line in summary_lines(run, 4) if line.startswith("Without effect here (")]
    assert len(said) == bool(unused)
    assert all(key in said[0] for key in unused)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has triton")
def test_triton_on_cpu_is_refused_in_one_line(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    loaded = load("--relay.kernels", "triton")
    with pytest.raises(ConfigError) as refused:
        check_device(loaded.config, loaded.origins, cpu=True)
    assert str(refused.value) == (
        'command line: --relay.kernels = "triton": cannot be used: the tensors are on cpu, and it '
        'runs on CUDA devices; use kernels = "auto" or "torch"'
    )


@pytest.mark.parametrize(
    ("backend", "words"),
    [("inducter", "did you mean inductor?"), ("gcc", "torch here has ")],
)
def test_a_compiler_that_is_not_there_is_refused_in_one_line(backend, words):
    loaded = load("--compile.enable", "true", "--compile.backend", backend)
    with pytest.raises(ConfigError, match=r"--compile.backend = .*no such backend; ") as refused:
        check_device(loaded.config, loaded.origins, cpu=True)
    assert words in str(refused.value)


def test_kernels_are_compiled_before_the_first_step(caplog):
    # The interpreter stands for the compiler; the smallest layer that has tiles.
    sizes = {"dim": 16, "moe.expert_dim": 16, "moe.num_experts": 2, "moe.top_k": 1}
    arguments = [f"--model.{key}={value}" for key, value in sizes.items()]
    arguments += ["--parallelism.expert_parallel_degree=1"]
    for kernels, messages in (("torch", 0), ("triton", 1)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            run = load(*arguments, "--relay.kernels", kernels).config
            warm_up_kernels(run, 1, torch.device("cpu"))
        assert caplog.text.count("Relay kernels: ready before the first step") == messages
