"""Training from a Hugging Face folder and into one: the trainer computes what transformers does,
the last checkpoint is a whole folder, and what does not fit is refused before anything is built."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.distributed import run_ranks
from tests.titan.hf.cases import CASES, SEQ_LEN, VOCAB_SIZE
from tests.titan.hf.folders import run_of, write_folder
from tests.titan.runs import a_run, config_file, layout, trainer_of, write_data
from titan_relay.cli import main
from titan_relay.config import ConfigError, Origins, RunConfig
from titan_relay.titan.hf.completion import first_damage, read_mark
from titan_relay.titan.hf.folder import open_folder
from titan_relay.titan.hf.from_hf import from_hf
from titan_relay.titan.hf_compare import (
    GRADIENTS,
    Comparison,
    Layout,
    compare_on_rank,
    comparison_run,
    reference_step,
)
from titan_relay.titan.preflight.model_files import check_export, check_initial_weights

# Float32 sums in another order; relative to the largest value of a tensor.
TOLERANCE = 1e-5
Settings = tuple[tuple[str, Any], ...]
FIRST_OF_FAMILY = {case.family: case for case in reversed(CASES)}
LAYOUTS = (
    Layout(ep=2, circulate="tokens"),
    Layout(ep=2, circulate="experts"),
    Layout(ep=2, dispatcher="alltoall"),
    Layout(cp=2),
    Layout(ep=2, cp=2),
)
COMPARED = {
    family: LAYOUTS[index % len(LAYOUTS)] for index, family in enumerate(sorted(FIRST_OF_FAMILY))
}


def ranks_main(
    folder: str,
    runs: dict[str, RunConfig],
    tokens: torch.Tensor,
    model: tuple[tuple[str, Any], ...],
) -> tuple[dict[str, Comparison | None], list[str]]:
    """On each of two ranks: the comparisons, then a run from a folder that ends with one."""
    torch.set_num_threads(1)
    found = {name: compare_on_rank(run, tokens, Path(folder) / name) for name, run in runs.items()}
    return found, train_and_export(Path(folder), model)


def train_and_export(folder: Path, model: Settings) -> list[str]:
    """Train two steps; returns the names of exported tensors that are not the trained ones."""
    from torchtitan.components.checkpointer.utils import canonical_fqn

    from titan_relay.titan.hf.names import NameMap

    run = a_run(
        "trained",
        **layout(dp=2, ep=2),
        training__steps=2,
        training__seq_len=SEQ_LEN,
        checkpoint__enable=True,
        checkpoint__initial_load_path=str(folder / "qwen3_moe" / "hf"),
        checkpoint__initial_load_in_hf=True,
        checkpoint__last_save_in_hf=True,
    )
    trainer = trainer_of(folder, replace(run, settings=model + run.settings))
    trainer.train()
    exported = open_folder(folder / "trained" / "checkpoint" / "step-2")
    names = NameMap(trainer.config.run.model)
    wrong = []
    for name, parameter in trainer.model_parts[0].named_parameters():
        for hf_name, value in names.to_hf(canonical_fqn(name), parameter.full_tensor()).items():
            if not torch.equal(exported.read(hf_name), value):
                wrong.append(hf_name)
    trainer.close()
    return wrong


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, Comparison], list[list[str]]]:
    """The folder, rank 0's comparisons by family, and each rank's wrong exports."""
    folder = tmp_path_factory.mktemp("training")
    write_data(folder)
    config_file(folder)
    tokens = torch.randint(VOCAB_SIZE, (2, SEQ_LEN + 1), generator=torch.manual_seed(1))
    runs = {}
    for family, case in FIRST_OF_FAMILY.items():
        write_folder(folder / family / "hf", case)
        runs[family] = _comparison(
            folder / family, run_of(folder / family / "hf"), COMPARED[family]
        )
        reference_step(folder / family / "hf", tokens, folder / family)
    spoilt = folder / "spoilt"
    shutil.copytree(folder / "qwen3_moe", spoilt)
    _spoil(spoilt / GRADIENTS, SPOILT)
    runs["spoilt"] = replace(runs["qwen3_moe"], dump_folder=str(spoilt / "run"))
    model = tuple((f"model.{k}", v) for k, v in FIRST_OF_FAMILY["qwen3_moe"].model.items())
    by_rank = run_ranks(ranks_main, 2, str(folder), runs, tokens, model, timeout_s=500.0)
    return folder, by_rank[0][0], [each[1] for each in by_rank]


SPOILT = "model.layers.1.mlp.experts.3.up_proj.weight"


def _comparison(folder: Path, run: RunConfig, layout: Layout) -> RunConfig:
    return comparison_run(run, layout, folder / "hf", folder, (2, SEQ_LEN + 1))


def _spoil(file: Path, name: str) -> None:
    """Change one value of one gradient by a thousandth."""
    gradients = load_file(file)
    value = gradients[name].clone()
    value.view(-1)[value.abs().argmax()] *= 1.001
    save_file(gradients | {name: value}, file)


@pytest.mark.parametrize("family", sorted(FIRST_OF_FAMILY))
def test_the_trainer_computes_what_transformers_computes(
    family: str, results: tuple[Path, dict[str, Comparison], Any]
) -> None:
    comparison = results[1][family]
    assert comparison.worst.relative < TOLERANCE, comparison.worst
    names = open_folder(results[0] / family / "hf").places
    assert {each.name for each in comparison.gradients} == {
        name for name in names if not name.endswith("e_score_correction_bias")
    }


def test_a_small_difference_is_found_and_named(results: tuple[Path, Any, Any]) -> None:
    worst = results[1]["spoilt"].worst
    assert worst.name == SPOILT
    assert 5e-4 < worst.relative < 2e-3


def test_the_last_checkpoint_is_a_whole_folder(results: tuple[Path, Any, list[list[str]]]) -> None:
    from transformers import AutoModelForCausalLM

    folder, _, wrong_by_rank = results
    assert wrong_by_rank == [[], []]
    exported, source = folder / "trained" / "checkpoint" / "step-2", folder / "qwen3_moe" / "hf"
    assert {each.name for each in exported.iterdir()} == {
        "complete.json",
        "config.json",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "ranks.tiktoken",  # what it was trained with, not what the source has
    }
    marks = read_mark(exported)
    assert marks is not None
    assert set(marks) | {"complete.json"} == {each.name for each in exported.iterdir()}
    assert first_damage(exported, marks, marks) is None
    one, other = open_folder(exported), open_folder(source)
    assert one.places.keys() == other.places.keys()
    assert not torch.equal(one.read("lm_head.weight"), other.read("lm_head.weight"))  # trained
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert torch.equal(model.lm_head.weight, one.read("lm_head.weight"))


def _starting_run(folder: Path, path: Path, **checkpoint: Any) -> RunConfig:
    run = run_of(folder)
    return replace(
        run,
        checkpoint=replace(run.checkpoint, enable=True, initial_load_path=str(path), **checkpoint),
    )


def test_weights_of_another_model_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf")
    origins = Origins("case.toml")
    run = _starting_run(tmp_path / "hf", tmp_path / "hf", initial_load_in_hf=True)
    check_initial_weights(run, origins)
    wider = replace(run, model=replace(run.model, moe=replace(run.model.moe, expert_dim=24)))
    with pytest.raises(ConfigError, match=r"initial_load_path = .*model.moe.expert_dim = 24: .*20"):
        check_initial_weights(wider, origins)
    (tmp_path / "hf" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_initial_weights(run, origins)


@pytest.mark.parametrize("path", ["nowhere://bucket/step-8", "s3://bucket/step-8"])
def test_a_place_that_nothing_here_can_reach_is_one_line(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as where it is not installed
    write_folder(tmp_path / "hf")
    run = _starting_run(tmp_path / "hf", tmp_path)
    run = replace(run, checkpoint=replace(run.checkpoint, initial_load_path=path))
    with pytest.raises(ConfigError, match=f'initial_load_path = "{path}".*: .*(known|s3fs)'):
        check_initial_weights(run, Origins("case.toml"))


def test_a_checkpoint_of_our_own_is_checked_too(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf")
    origins = Origins("case.toml")
    run = _starting_run(tmp_path / "hf", tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="is no complete checkpoint"):
        check_initial_weights(run, origins)
    from_hf(tmp_path / "hf", run.model, tmp_path / "checkpoint")
    check_initial_weights(run, origins)
    biased = replace(run.model.moe, aux_loss_coeff=0.0, load_balance_coeff=0.001)
    with pytest.raises(ConfigError, match=r"2 missing \(layers.0.moe.expert_bias_E\)"):
        check_initial_weights(replace(run, model=replace(run.model, moe=biased)), origins)


def test_an_export_that_hugging_face_cannot_compute_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(tmp_path / "hf")
    run = run_of(tmp_path / "hf")
    run = replace(run, checkpoint=replace(run.checkpoint, enable=True, last_save_in_hf=True))
    check_export(run, Origins("case.toml"))
    assert not caplog.records
    scaled = replace(run, model=replace(run.model, moe=replace(run.model.moe, route_scale=2.0)))
    with pytest.raises(ConfigError, match=r"last_save_in_hf = true.*model.moe.route_scale = 2.0"):
        check_export(scaled, Origins("case.toml"))
    biased = replace(run.model.moe, aux_loss_coeff=0.0, load_balance_coeff=0.001)
    check_export(replace(run, model=replace(run.model, moe=biased)), Origins("case.toml"))
    assert "has no balancing bias" in caplog.text


@pytest.mark.slow
def test_the_command_compares_and_judges(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "hf")
    run_of(tmp_path / "hf")
    arguments = ["--hf-dir", str(tmp_path / "hf"), "--config", str(tmp_path / "hf.toml")]
    arguments += ["--seq-len", "20", "--ep", "2", "--circulate", "tokens"]
    assert main(["compare", *arguments]) == 0
    assert "the same function" in capfd.readouterr().out
    assert main(["compare", *arguments, "--tolerance", "1e-12"]) == 1
    assert "NOT the same function" in capfd.readouterr().out
    assert main(["compare", *arguments, "--model.moe.top_k", "2"]) == 2
    assert main(["compare", *arguments, "--ep", "3"]) == 2
