"""`[model]` and Hugging Face's `config.json`: read, written, compared."""

from __future__ import annotations

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.titan.hf.cases import CASES, Case
from titan_relay.config import ConfigError, RunConfig, load_config
from titan_relay.config.schema import ModelConfig, keys
from titan_relay.config.schema_model import FamilyName
from titan_relay.titan.hf.config_json import (
    config_of,
    first_difference,
    model_of,
    mtp_layers,
    toml_of,
)
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.model import families
from titan_relay.titan.model.families import FAMILIES
from titan_relay.validate import validate_model

CONFIGS = Path(__file__).parents[3] / "train_configs"
# Keys of a case that say how it is trained; a config.json does not know them.
TRAINING = ("moe.aux_loss_coeff", "moe.z_loss_coeff", "moe.load_balance_coeff")


def transformers_config(case: Case) -> Any:
    import transformers

    return getattr(transformers, case.config)(**case.hf)


def parsed(config: dict[str, Any], tmp_path: Path) -> RunConfig:
    file = tmp_path / "model.toml"
    file.write_text(toml_of(config))
    loaded = load_config(["--config", str(file)])
    validate_model(loaded.config, loaded.origins)
    return loaded.config


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family} {case.name}")
def test_config_json_becomes_the_model_section_and_back(case: Case, tmp_path: Path) -> None:
    config = transformers_config(case)
    model = parsed(config.to_dict(), tmp_path).model
    for key, value in case.model.items():  # written by hand, not derived from `hf`
        if key not in TRAINING:
            assert attrgetter(key)(model) == value, key
    assert first_difference(model, config.to_dict()) is None
    written = config_of(model, "bfloat16")
    assert first_difference(model, written) is None
    if written["model_type"] != config.model_type:
        # GLM's shape is written as DeepSeek's class, which computes the same.
        assert (config.model_type, written["model_type"]) == ("glm4_moe_lite", "deepseek_v3")
        return
    again = type(config).from_dict(written)
    for name in case.hf:
        assert getattr(again, name) == getattr(config, name), name


def test_every_family_has_its_name_in_the_configuration() -> None:
    """A family's file is found by its name in `FamilyName` of config/schema_model.py."""
    files = {
        path.stem
        for path in Path(families.__path__[0]).glob("*.py")
        if "\nFAMILY = " in path.read_text("utf-8")
    }
    assert files == set(get_args(FamilyName))


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_that_a_family_names_exist(name: str) -> None:
    """A key misspelt in a family's file would be one that is never checked, or never read."""
    family = FAMILIES[name]
    named = [*family.parts, *family.only]
    for each in family.architectures:
        named += [f"model.{toml}" for toml in (*each.fixed, *(key.toml for key in each.keys))]
    assert set(named) <= set(keys())


def test_a_model_alone_is_held_against_its_family() -> None:
    """As counting and converting do, which train nothing."""
    settings = ["--config", str(CONFIGS / "mixtral_8x7b.toml"), "--model.mla.kv_lora_rank=4"]
    loaded = load_config(settings)
    with pytest.raises(ConfigError, match='family "mixtral" has no such part'):
        validate_model(loaded.config, loaded.origins)


def test_dense_layers_behind_others_are_refused() -> None:
    config = transformers_config(next(case for case in CASES if case.config == "Glm4MoeLiteConfig"))
    kinds = ["sparse", "dense"] + ["sparse"] * (config.num_hidden_layers - 2)
    with pytest.raises(HfError, match="mlp_layer_types: family mla_moe has its dense layers first"):
        model_of(config.to_dict() | {"mlp_layer_types": kinds})


@pytest.fixture
def qwen3(tmp_path: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """A model and its config.json."""
    config = transformers_config(CASES[0]).to_dict()
    return parsed(config, tmp_path).model, config


def test_older_files_are_understood(
    qwen3: tuple[ModelConfig, dict[str, Any]],
) -> None:
    """theta at the top, experts under their first name, no head_dim where it follows."""
    model, config = qwen3
    rope = config.pop("rope_parameters")
    config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
    old = config | {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    assert first_difference(model, old) is None
    mixtral = transformers_config(
        next(case for case in CASES if case.family == "mixtral")
    ).to_dict()
    del mixtral["head_dim"]
    assert model_of(mixtral)["head_dim"] == 72 // 9


def test_what_a_file_leaves_out_is_the_default_of_its_class(
    qwen3: tuple[ModelConfig, dict[str, Any]],
) -> None:
    _, config = qwen3
    del config["norm_topk_prob"], config["rms_norm_eps"]
    values = model_of(config)
    assert values["moe.route_norm"] is False  # Qwen3MoeConfig's default
    assert values["norm_eps"] == 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, r"model_type = 'llama': no family for it"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu': family qwen3_moe computes only 'silu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type = 'yarn'"),
        ({"rope_parameters": {"type": "linear", "rope_theta": 1e6}}, "rope_type = 'linear'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
    ],
)
def test_what_no_family_computes_is_refused(
    change: dict[str, Any], message: str, qwen3: tuple[ModelConfig, dict[str, Any]]
) -> None:
    _, config = qwen3
    with pytest.raises(HfError, match=message):
        model_of(config | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": -3}, r"config.json: num_experts = -3: must be an integer of at least 1"),
        ({"hidden_size": "64"}, 'config.json: hidden_size = "64": must be an integer'),
        ({"rms_norm_eps": True}, "config.json: rms_norm_eps = true: must be a finite number"),
        ({"num_hidden_layers": 2.5}, "config.json: num_hidden_layers = 2.5: must be"),
        ({"head_dim": None, "hidden_size": "x"}, "config.json: "),
        ({"norm_topk_prob": "yes", "rms_norm_eps": None}, "config.json: "),
        ({"num_hidden_layers": [2], "norm_topk_prob": None}, "config.json: transformers does not"),
    ],
)
def test_a_value_of_another_kind_is_one_line(
    change: dict[str, Any], message: str, qwen3: tuple[ModelConfig, dict[str, Any]]
) -> None:
    _, config = qwen3
    with pytest.raises(ConfigError, match=message) as refused:
        model_of(config | change)
    assert "\n" not in str(refused.value)


def test_a_window_that_would_matter_is_refused() -> None:
    mixtral = transformers_config(next(case for case in CASES if case.family == "mixtral"))
    longest = mixtral.max_position_embeddings
    model_of(mixtral.to_dict() | {"sliding_window": longest})
    with pytest.raises(HfError, match=f"sliding_window = {longest - 1} is shorter than"):
        model_of(mixtral.to_dict() | {"sliding_window": longest - 1})


def test_the_first_difference_is_named_and_choices_of_training_are_none(
    qwen3: tuple[ModelConfig, dict[str, Any]],
) -> None:
    model, config = qwen3
    difference = first_difference(replace(model, rope_theta=1.0), config)
    assert difference is not None
    assert difference.startswith("model.rope_theta = 1.0: config.json has rope_theta = ")
    assert first_difference(replace(model, max_seq_len=7, init_std=1.0), config) is None
    other = first_difference(replace(model, moe=replace(model.moe, score_func="sigmoid")), config)
    assert other is not None
    assert other.startswith('model.moe.score_func = "sigmoid": ')


def test_a_model_that_hugging_face_cannot_compute_is_not_written(
    qwen3: tuple[ModelConfig, dict[str, Any]],
) -> None:
    model, _ = qwen3
    with pytest.raises(HfError, match=r"model.moe.route_scale = 2.0: Qwen3MoeForCausalLM has only"):
        config_of(replace(model, moe=replace(model.moe, route_scale=2.0)), "bfloat16")


def test_layers_for_further_tokens_are_counted() -> None:
    assert list(mtp_layers({"num_hidden_layers": 47, "num_nextn_predict_layers": 1})) == [47]
    assert list(mtp_layers({"num_hidden_layers": 47})) == []


RELEASED = json.loads((Path(__file__).parent / "released_configs.json").read_text())
RELEASED = {name: each for name, each in RELEASED.items() if (CONFIGS / f"{name}.toml").is_file()}


@pytest.mark.parametrize("name", RELEASED)
def test_released_files_are_the_models_of_train_configs(name: str, tmp_path: Path) -> None:
    """As the released `config.json` has it, older keys and all, so its weights can be loaded."""
    released = RELEASED[name]
    model = load_config(["--config", str(CONFIGS / f"{name}.toml")]).config.model
    assert first_difference(model, released) is None
    assert first_difference(parsed(released, tmp_path).model, released) is None


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_train_config_can_be_exported(path: Path) -> None:
    model = load_config(["--config", str(path)]).config.model
    written = json.loads(json.dumps(config_of(model, "bfloat16")))
    assert first_difference(model, written) is None
