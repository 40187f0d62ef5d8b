"""Checkpoints of runs that go back, beside other things in their folder, with few kept."""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from tests.titan.runs import a_run, config_file, layout, load_run, trainer_of, write_data
from titan_relay.config import ConfigError, Origins
from titan_relay.private_torch import group_timeout
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.preflight.shared_folder import check_shared_folder
from titan_relay.titan.train.checkpoint_folder import CheckpointFolder
from titan_relay.titan.train.checkpoint_writer import SaveError

MODES = ("disabled", "async")
POLICIES = ("stop", "continue")
COMMON: dict[str, Any] = {
    **layout(dp=2, ep=2),
    "model__num_layers": 1,
    "training__steps": 12,
    "checkpoint__enable": True,
    "checkpoint__interval": 1,
    "checkpoint__last_save_model_only": False,
}
FOREIGN = ("step-100", "step-20.tmp", "step-abc", "step-10-good", "step-008", "step-²", "step-٩")


def train(path: Path, name: str, *, kill_after: int = 1000, **settings: Any) -> dict[str, Any]:
    """Losses, the steps that were complete after each step, and what lies in the folder at the end.

    A run that is ended from outside closes in order, and saves no last step.
    """
    trainer = trainer_of(path, a_run(name, **COMMON | settings))
    checkpoints = CheckpointFolder(path / name / "checkpoint")
    train_step, complete = trainer.train_step, {}

    def look_before(data: Any) -> None:
        dist.barrier()
        complete[trainer.step - 1] = set(checkpoints.complete())
        dist.barrier()
        if trainer.step > kill_after:
            raise KeyboardInterrupt
        train_step(data)

    trainer.train_step = look_before
    with closing(trainer), suppress(KeyboardInterrupt):
        trainer.train()
    dist.barrier()
    names = {each.name for each in checkpoints.path.iterdir()}
    return {"losses": trainer.losses, "complete": complete, "names": names}


def copy_of_whole(path: Path, name: str, *, newest: int = 12) -> None:
    """A run that has the checkpoints of the whole one up to a step."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(path / "whole", path / name)
        for step in range(newest + 2, 14, 2):
            shutil.rmtree(path / name / "checkpoint" / f"step-{step}")
    dist.barrier()


def add_foreign(folder: Path) -> None:
    """Beside the checkpoints put what is none; step-100 is torn."""
    if dist.get_rank() == 0:
        for name in FOREIGN:
            shutil.copytree(folder / "step-10", folder / name)
        (folder / "step-100" / ".metadata").unlink()
        (folder / "step-3").write_text("a file")
    dist.barrier()


def retention(path: Path, mode: str) -> dict[str, Any]:
    """Steps 2 to 10 in steps of two and other things in the folder, then one step after the other.

    With a thread the run is ended after step 12, without one it goes to its end at step 13.
    """
    copy_of_whole(path, mode, newest=10)
    add_foreign(path / mode / "checkpoint")
    keys = {"checkpoint__keep_latest_k": 2, "checkpoint__async_mode": mode}
    last = 12 if mode == "async" else 1000
    return train(path, mode, training__steps=13, kill_after=last, **keys)


def going_back(path: Path, mode: str) -> dict[str, Any]:
    """Steps 2 to 12, back to 8, ended after step 10; the same command again, ended after 11."""
    name = f"back {mode}"
    copy_of_whole(path, name)
    keys = {"checkpoint__load_step": 8, "checkpoint__keep_latest_k": 2}
    keys |= {"checkpoint__async_mode": mode}
    return {
        "seen": train(path, name, kill_after=9, checkpoint__load_only=True, **keys),
        "first": train(path, name, kill_after=10, **keys),
        "again": train(path, name, kill_after=11, **keys),
    }


def a_copy_by_name(path: Path) -> list[float]:
    """Start anew from a copy that is no checkpoint of a run; the losses."""
    copy = path / "disabled" / "checkpoint" / "step-10-good"
    keys = {
        "checkpoint__initial_load_path": str(copy),
        "checkpoint__initial_load_model_only": False,
    }
    losses: list[float] = train(path, "copy", kill_after=11, **keys)["losses"]
    return losses


def afresh(path: Path) -> set[str]:
    """Steps 2 to 12, and on from 12 with the step counted from 0 again: that goes back too."""
    copy_of_whole(path, "afresh")
    keys = {"checkpoint__exclude_from_loading": "train_state", "checkpoint__keep_latest_k": 2}
    names: set[str] = train(path, "afresh", kill_after=3, **keys)["names"]
    return names


def leaving(path: Path) -> dict[str, Any]:
    """Leave while a thread saves: one that takes a second, and one that fails."""
    copy_of_whole(path, "leaving")  # nothing is left to train
    trainer = trainer_of(path, a_run("leaving", **COMMON | {"checkpoint__async_mode": "async"}))
    timeout_s = group_timeout(trainer.checkpointer.pg).total_seconds()
    failed: Future[None] = Future()
    failed.set_exception(OSError("no space left"))
    trainer.checkpointer.save_future = failed
    raised = ""
    try:
        trainer.train()
    except SaveError as error:
        raised = str(error)
    slow: Future[None] = Future()
    trainer.checkpointer.save_future = slow
    threading.Timer(1.0, slow.set_result, [None]).start()
    began = time.monotonic()
    trainer.close()
    waited = time.monotonic() - began
    return {"raised": raised, "waited": waited, "ended": slow.done(), "timeout_s": timeout_s}


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damaged(path: Path) -> dict[str, Any]:
    """Step 12 has a flipped bit, step 10 is empty; then one sound step, and then none at all."""
    copy_of_whole(path, "damaged")
    checkpoints = CheckpointFolder(path / "damaged" / "checkpoint")
    if dist.get_rank() == 0:
        flip(checkpoints.of_step(12) / "__1_0.distcp")
        shutil.rmtree(checkpoints.of_step(10))
        checkpoints.of_step(10).mkdir()
        checkpoints.saving(11).mkdir()
    dist.barrier()
    outcome: dict[str, Any] = {"skipped": train(path, "damaged", kill_after=9)}
    if dist.get_rank() == 0:
        for folder in checkpoints.complete().values():
            flip(folder / "__0_0.distcp")
    dist.barrier()
    for name, keys in {"none": {}, "asked": {"checkpoint__load_step": 8}}.items():
        try:
            train(path, "damaged", **keys)
        except HfError as error:
            outcome[name] = str(error)
    return outcome


@contextmanager
def no_room(num_bytes: int) -> Iterator[None]:
    """Let rank 1 write no larger files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full(path: Path, mode: str, policy: str) -> dict[str, Any]:
    """Saves of steps 11 and 12 that do not succeed; what is raised, and what is left."""
    name = f"full {mode} {policy}"
    copy_of_whole(path, name, newest=10)
    keys = {"checkpoint__on_save_error": policy, "checkpoint__async_mode": mode}
    raised, losses = "", []
    with no_room(100_000):
        try:
            losses = train(path, name, kill_after=12, training__steps=20, **keys)["losses"]
        except SaveError as error:
            raised = str(error)
    dist.barrier()
    names = {each.name for each in (path / name / "checkpoint").iterdir()}
    return {"raised": raised, "losses": losses, "names": names}


def working_folders(path: Path, shared: bool) -> str:
    """Ranks started in folders of their own, as on two nodes, or in one; what they are told."""
    own = path / "nodes" / ("one" if shared else str(dist.get_rank()))
    (own / "out" / "checkpoint").mkdir(parents=True, exist_ok=True)
    os.chdir(own)
    run = replace(load_run(path, a_run("any", **COMMON)), dump_folder="out")
    try:
        check_shared_folder(run, Origins("run.toml"), timeout_s=0.5)
        dist.barrier()  # rank 0 removes its file after the others have seen it
        left = [str(each) for each in own.rglob("*") if each.is_file()]
        return f"left: {left}"
    except ConfigError as error:
        return str(error)
    finally:
        os.chdir(path)


def no_checkpoints(path: Path) -> str:
    """What is told where nothing has to be shared."""
    run = load_run(path, a_run("any", **layout(dp=2)))
    run = replace(run, dump_folder=f"{path}/of rank {dist.get_rank()}")
    check_shared_folder(run, Origins("run.toml"), timeout_s=0.5)
    return "nothing"


def scenario(folder: str) -> dict[str, Any]:
    """All of this file inside one group of ranks."""
    torch.set_num_threads(1)
    path = Path(folder)
    whole = train(path, "whole", checkpoint__interval=2)
    return {
        "whole": whole["losses"],
        **{f"retention, {mode}": retention(path, mode) for mode in MODES},
        **{f"going back, {mode}": going_back(path, mode) for mode in MODES},
        "copy": a_copy_by_name(path),
        "afresh": afresh(path),
        "leaving": leaving(path),
        "damaged": damaged(path),
        **{f"full, {mode}, {say}": full(path, mode, say) for mode in MODES for say in POLICIES},
        "folders": {shared: working_folders(path, shared) for shared in (False, True)},
        "no checkpoints": no_checkpoints(path),
    }


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_data(folder)
    config_file(folder)
    return run_ranks(scenario, 2, str(folder), timeout_s=400.0)


@pytest.fixture(scope="module")
def outcome(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    return by_rank[0]


@pytest.mark.parametrize("mode", MODES)
def test_retention_deletes_only_old_checkpoints_of_the_run(
    mode: str, outcome: dict[str, Any]
) -> None:
    names = outcome[f"retention, {mode}"]["names"]
    assert {*FOREIGN, "step-3"} < names
    newest = {"step-11", "step-12"} if mode == "async" else {"step-12", "step-13"}
    assert names - {*FOREIGN, "step-3", ".lock"} == {"step-10"} | newest


@pytest.mark.parametrize("mode", MODES)
def test_what_was_loaded_and_one_more_are_complete_at_every_moment(
    mode: str, outcome: dict[str, Any]
) -> None:
    retained = outcome[f"retention, {mode}"]["complete"]
    gone_back = outcome[f"going back, {mode}"]["first"]["complete"]
    assert set(retained) == {10, 11, 12}
    assert set(gone_back) == {8, 9, 10}
    for complete, loaded in ((retained, 10), (gone_back, 8)):
        for step, there in complete.items():
            assert loaded in there, step
            assert step == loaded or len(there) >= 2, step


@pytest.mark.parametrize("mode", MODES)
def test_going_back_puts_the_later_checkpoints_aside(mode: str, outcome: dict[str, Any]) -> None:
    first = outcome[f"going back, {mode}"]["first"]
    aside = {f"step-{step}.after-going-back-to-8" for step in (10, 12)}
    assert aside | {"step-8", "step-9", "step-10"} < first["names"]
    assert "step-12" not in first["names"]
    assert first["losses"] == outcome["whole"][8:10]


@pytest.mark.parametrize("mode", MODES)
def test_the_same_command_again_goes_on_with_the_line_that_it_began(
    mode: str, outcome: dict[str, Any]
) -> None:
    again = outcome[f"going back, {mode}"]["again"]
    assert again["losses"] == outcome["whole"][10:11]
    assert {"step-10", "step-11"} < again["names"]
    assert "step-10.after-going-back-to-8-2" not in again["names"]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_never_saves_puts_nothing_aside(mode: str, outcome: dict[str, Any]) -> None:
    seen = outcome[f"going back, {mode}"]["seen"]
    assert seen["losses"] == outcome["whole"][8:9]
    assert seen["names"] >= {"step-8", "step-10", "step-12"}


def test_a_copy_can_be_started_from_by_its_name(outcome: dict[str, Any]) -> None:
    assert outcome["copy"] == outcome["whole"][10:11]


def test_steps_counted_afresh_begin_a_line_of_their_own(outcome: dict[str, Any]) -> None:
    aside = {f"step-{step}.after-going-back-to-0" for step in range(2, 13, 2)}
    assert outcome["afresh"] - aside - {".lock"} == {"step-2", "step-3"}


def test_the_process_ends_after_the_thread_that_saves(by_rank: list[dict[str, Any]]) -> None:
    for rank in by_rank:
        assert rank["leaving"]["ended"]
        assert rank["leaving"]["waited"] > 0.5


def test_a_save_that_failed_in_a_thread_is_raised_at_the_end(by_rank: list[dict[str, Any]]) -> None:
    for rank in by_rank:
        told = rank["leaving"]["raised"]
        assert told.endswith("could not be saved: no space left; earlier checkpoints are untouched")


def test_a_damaged_checkpoint_is_skipped_for_the_newest_sound_one(outcome: dict[str, Any]) -> None:
    skipped = outcome["damaged"]["skipped"]
    assert skipped["losses"] == outcome["whole"][8:9]
    there = {f"step-{step}" for step in (2, 4, 6, 8, 9, 10)}  # the empty step-10 is left alone
    assert skipped["names"] - {".lock"} == there | {"step-12.after-going-back-to-8"}


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(
    by_rank: list[dict[str, Any]],
) -> None:
    for rank in by_rank:
        assert "does not start over" in rank["damaged"]["none"]
        assert "step-8 is damaged: __0_0.distcp is not what was written" in rank["damaged"]["asked"]


@pytest.mark.parametrize("mode", MODES)
def test_a_save_without_room_stops_in_one_line_and_leaves_nothing(
    mode: str, by_rank: list[dict[str, Any]]
) -> None:
    for rank in by_rank:
        told = rank[f"full, {mode}, stop"]
        assert told["raised"].startswith("step 11 could not be saved: ")
        assert "step-11.saving/__1_0.distcp: File too large (it needs 0." in told["raised"]
        assert told["names"] - {".lock"} == {f"step-{step}" for step in (2, 4, 6, 8, 10)}


@pytest.mark.parametrize("mode", MODES)
def test_a_save_without_room_can_be_gone_on_from(mode: str, outcome: dict[str, Any]) -> None:
    went_on = outcome[f"full, {mode}, continue"]
    assert went_on["raised"] == ""
    assert went_on["losses"] == outcome["whole"][10:12]
    assert went_on["names"] - {".lock"} == {f"step-{step}" for step in (2, 4, 6, 8, 10)}


def test_ranks_that_save_by_a_thread_wait_for_one_another_no_longer_than_in_training(
    by_rank: list[dict[str, Any]],
) -> None:
    for rank in by_rank:
        assert rank["leaving"]["timeout_s"] == 100.0  # comm.train_timeout_seconds


def test_ranks_that_do_not_see_the_folder_are_named(by_rank: list[dict[str, Any]]) -> None:
    first, second = (rank["folders"][False] for rank in by_rank)
    assert first == second
    assert first.startswith('run.toml: dump_folder = "out" (default): rank 1 (')
    assert "cannot see what rank 0 (" in first
    assert "all nodes share" in first


def test_a_shared_folder_is_let_pass_and_left_as_it_was(by_rank: list[dict[str, Any]]) -> None:
    for rank in by_rank:
        assert rank["folders"][True] == "left: []"
        assert rank["no checkpoints"] == "nothing"
