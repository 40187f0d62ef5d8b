"""What a run finds in its checkpoint folder before anything is built."""

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.payload import Payload
from tests.titan.runs import a_run, config_file, load_run, write_data
from titan_relay.config import ConfigError, Origins, RunConfig, to_toml
from titan_relay.titan.preflight.resume import check_checkpoint, find_checkpoint
from titan_relay.titan.train.checkpoint_folder import CheckpointFolder

ORIGINS = Origins("run.toml")


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    write_data(tmp_path)
    config_file(tmp_path)
    return load_run(tmp_path, a_run("out", checkpoint__enable=True))


def going_to(run: RunConfig, load_step: int, **keys: Any) -> RunConfig:
    return replace(run, checkpoint=replace(run.checkpoint, load_step=load_step, **keys))


def folder_of(run: RunConfig) -> CheckpointFolder:
    return CheckpointFolder(Path(run.dump_folder) / run.checkpoint.folder)


def save(run: RunConfig, *steps: int) -> None:
    """Whole checkpoints of one tensor, as far as the file format goes."""
    for step in steps:
        path = folder_of(run).of_step(step)
        dcp.save({"tok_embeddings.weight": torch.zeros(257, 32)}, checkpoint_id=path, no_dist=True)


def test_a_run_without_checkpoints_starts_fresh(run: RunConfig) -> None:
    assert find_checkpoint(run, ORIGINS) is None


@pytest.mark.parametrize("load_step", [0, 7])
@pytest.mark.parametrize(("saved", "there"), [((), "none"), ((3, 10), "3, 10")])
def test_a_step_that_is_not_there_is_refused_with_those_that_are(
    load_step: int, saved: tuple[int, ...], there: str, run: RunConfig
) -> None:
    save(run, *saved)
    folder_of(run).of_step(load_step).mkdir(parents=True)  # torn
    with pytest.raises(ConfigError, match=f"load_step = {load_step}.*; there: {there}$"):
        find_checkpoint(going_to(run, load_step), ORIGINS)


def test_weights_of_step_0_are_enough_and_those_of_later_steps_are_not(run: RunConfig) -> None:
    run = replace(run, model=replace(run.model, num_layers=0))
    save(run, 0, 3)
    first = find_checkpoint(going_to(run, 0), ORIGINS)
    newest = find_checkpoint(run, ORIGINS)
    assert first is not None
    assert newest is not None
    assert (first.step, newest.step) == (0, 3)
    check_checkpoint(run, ORIGINS, first, 8)
    with pytest.raises(ConfigError, match="holds weights only"):
        check_checkpoint(run, ORIGINS, newest, 8)


@pytest.mark.parametrize("load_step", [0, -1])
def test_an_export_cannot_be_gone_on_from(load_step: int, run: RunConfig) -> None:
    path = folder_of(run).of_step(0)
    path.mkdir(parents=True)
    (path / "model.safetensors.index.json").write_text("{}")
    run = going_to(run, load_step, exclude_from_loading=("dataloader",))
    found = find_checkpoint(run, ORIGINS)
    assert found is not None
    with pytest.raises(ConfigError, match=r"last_save_in_hf.*checkpoint\.initial_load_path$"):
        check_checkpoint(run, ORIGINS, found, 8)


@pytest.mark.parametrize("load_step", [3, -1])
def test_a_missing_file_may_lie_on_another_node(load_step: int, run: RunConfig) -> None:
    save(run, 3)
    (folder_of(run).of_step(3) / "__0_0.distcp").unlink()
    with pytest.raises(ConfigError, match=r"__0_0\.distcp is missing; if nodes had a folder each"):
        find_checkpoint(going_to(run, load_step), ORIGINS)


@pytest.mark.parametrize(
    "damage", ["empty", "cut short", "no metadata", "no file", "no mark", "planted"]
)
def test_the_newest_sound_one_is_found_and_a_damaged_one_that_is_asked_for_refused(
    damage: str, run: RunConfig
) -> None:
    save(run, 3, 10)
    newest = folder_of(run).of_step(10)
    if damage == "empty":
        shutil.rmtree(newest)
        newest.mkdir()
    elif damage == "planted":
        (newest / ".metadata").write_bytes(pickle.dumps(Payload(newest / "ran")))
    elif damage == "cut short":
        os.truncate(newest / "__0_0.distcp", 100)
    elif damage == "no mark":
        dcp.save({"x": torch.zeros(2)}, checkpoint_id=f"{newest}.saving", no_dist=True)
        shutil.rmtree(newest)
        folder_of(run).publish(10)
    else:
        (newest / (".metadata" if damage == "no metadata" else "__0_0.distcp")).unlink()
    found = find_checkpoint(run, ORIGINS)
    assert found is not None
    assert found.step == 3
    assert not (newest / "ran").exists()
    with pytest.raises(ConfigError, match=r"load_step = 10.*(from step 3 with|; there: 3$)"):
        find_checkpoint(going_to(run, 10), ORIGINS)
    shutil.rmtree(folder_of(run).of_step(3))
    with pytest.raises(ConfigError, match=r"step-10.* does not start over"):
        find_checkpoint(run, ORIGINS)


def test_a_damaged_line_that_went_back_is_left_as_far_as_it_is_damaged(run: RunConfig) -> None:
    """The newest sound step is the one that was asked for already."""
    save(run, 8)
    asked = going_to(run, 8)
    folder_of(run).begin_line(8, 8, to_toml(asked))
    save(run, 9)
    (folder_of(run).of_step(9) / "__0_0.distcp").write_bytes(b"")
    found = find_checkpoint(asked, ORIGINS)
    assert found is not None
    assert found.step == 8
