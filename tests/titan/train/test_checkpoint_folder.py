"""What counts as a checkpoint, which one is loaded, and which ones a new one replaces."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_relay.titan.hf.completion import write_mark
from titan_relay.titan.train.checkpoint_folder import CheckpointFolder

FOREIGN = (
    "step-9999-bak",
    "best-step-4000",
    "step-008",
    "step-²",
    "step-٩",
    "step-10-good",
    "step-20.tmp",
    "step-abc",
    "step-",
    "step--1",
    "step-+1",
    "step-1_0",
    "step-10 ",
    "step-10\n",
    "Step-10",
    "step-10.after-going-back-to-8",
)


def checkpoint(folder: Path, name: str | int, mark: str = ".metadata") -> Path:
    """A folder that looks complete."""
    path = folder / (name if isinstance(name, str) else f"step-{name}")
    path.mkdir(parents=True)
    (path / mark).write_text("")
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_name_that_saving_does_not_give_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, name)
    assert CheckpointFolder(tmp_path).steps() == {}


@given(st.text("step-0123456789²٩.tmp", max_size=12))
def test_the_names_are_those_that_saving_gives(name: str) -> None:
    """Any name is a checkpoint's exactly if the step that it holds is written so."""
    digits = name.removeprefix("step-")
    ours = name.startswith("step-") and digits.isdecimal() and name == f"step-{int(digits)}"

    class Listing(type(Path())):  # type: ignore[misc]
        def is_dir(self) -> bool:
            return True

        def iterdir(self) -> list[Path]:
            return [self / name] if name.strip(".") else []

    assert len(CheckpointFolder(Listing("checkpoint")).steps()) == ours


def test_a_file_and_a_torn_folder_are_not_complete(tmp_path: Path) -> None:
    (tmp_path / "step-3").write_text("")
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-5" / ".metadata").mkdir(parents=True)
    exported = checkpoint(tmp_path, 6, "model.safetensors.index.json")
    folder = CheckpointFolder(tmp_path)
    assert list(folder.steps()) == [4, 5, 6]
    assert folder.complete() == {6: exported}


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "none")
    assert folder.complete() == {}
    assert folder.step_to_load(-1, "") == -1
    assert folder.step_to_load(7, "") == 7


def test_the_newest_by_number_not_by_spelling(tmp_path: Path) -> None:
    for step in (9, 10, 100, 11):
        checkpoint(tmp_path, step)
    (tmp_path / "step-1000").mkdir()
    assert CheckpointFolder(tmp_path).step_to_load(-1, "") == 100


@pytest.mark.parametrize(
    ("keep", "saved", "loaded", "stale"),
    [
        (2, 12, -1, [8, 9, 10]),
        (2, 12, 8, [9, 10]),
        (2, 12, 12, [8, 9, 10]),
        (4, 12, -1, [8]),
        (5, 12, -1, []),
        (10, 12, -1, []),
        (2, 13, -1, [8, 9, 10]),  # being saved: not complete yet, so two others stay
        (2, 10, -1, [8]),  # what is later is of nobody who saves step 10
        (2, 9, 8, []),
    ],
)
def test_what_is_replaced(
    keep: int, saved: int, loaded: int, stale: list[int], tmp_path: Path
) -> None:
    for step in (8, 9, 10, 11, 12):
        checkpoint(tmp_path, step)
    for name in FOREIGN:
        checkpoint(tmp_path, name)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-13").mkdir()
    found = CheckpointFolder(tmp_path).stale(keep, saved=saved, loaded=loaded)
    assert found == [tmp_path / f"step-{step}" for step in stale]


def test_a_linked_checkpoint_can_be_loaded_and_is_not_deleted(tmp_path: Path) -> None:
    checkpoint(tmp_path, "elsewhere")
    (tmp_path / "step-1").symlink_to(tmp_path / "elsewhere")
    folder = CheckpointFolder(tmp_path)
    assert list(folder.complete()) == [1]
    for step in (2, 3):
        checkpoint(tmp_path, step)
    assert folder.stale(2, saved=3, loaded=-1) == []


@pytest.mark.parametrize("linked", [True, False], ids=["link", "copy"])
def test_another_step_s_checkpoint_under_a_number_is_none(linked: bool, tmp_path: Path) -> None:
    write_mark(checkpoint(tmp_path, 3), 3, {})
    path = tmp_path / "step-9"
    path.symlink_to(tmp_path / "step-3") if linked else shutil.copytree(tmp_path / "step-3", path)
    folder = CheckpointFolder(tmp_path)
    assert list(folder.complete()) == [3]
    assert folder.step_to_load(-1, "") == 3
    assert folder.begin_line(3, -1, "") == []
    assert folder.stale(1, saved=9, loaded=-1) == []
    assert names(tmp_path) == {"step-3", "step-9"}


def test_going_back_puts_later_ones_aside_and_is_done_once(tmp_path: Path) -> None:
    for step in (8, 10, 12):
        checkpoint(tmp_path, step)
    (tmp_path / "step-100").mkdir()
    checkpoint(tmp_path, "step-10.after-going-back-to-8")
    folder = CheckpointFolder(tmp_path)
    assert folder.step_to_load(8, "lr = 1") == 8
    aside = folder.begin_line(8, 8, "lr = 1")
    assert [path.name for path in aside] == [
        "step-10.after-going-back-to-8-2",
        "step-12.after-going-back-to-8",
    ]
    assert list(folder.steps()) == [8, 100]  # what is no checkpoint is left alone
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10)
    assert folder.step_to_load(8, "lr = 1") == 10  # the same command again
    assert folder.step_to_load(-1, "lr = 1") == 10
    assert folder.step_to_load(8, "lr = 2") == 8  # another attempt
    assert folder.step_to_load(12, "lr = 1") == 12  # which is gone, and so refused
    folder.begin_line(10, -1, "")
    assert folder.step_to_load(8, "lr = 1") == 8  # in between the run was started without a step


def test_the_same_command_goes_on_when_its_step_has_been_replaced(tmp_path: Path) -> None:
    checkpoint(tmp_path, 8)
    folder = CheckpointFolder(tmp_path)
    folder.begin_line(8, 8, "request")
    for step in (20, 21):
        checkpoint(tmp_path, step)
    (tmp_path / "step-8" / ".metadata").unlink()
    assert folder.step_to_load(8, "request") == 21


def test_a_torn_checkpoint_is_not_put_aside_where_nobody_goes_back(tmp_path: Path) -> None:
    checkpoint(tmp_path, 8)
    (tmp_path / "step-100").mkdir()
    assert CheckpointFolder(tmp_path).begin_line(8, -1, "") == []
    assert names(tmp_path) == {"step-8", "step-100"}
