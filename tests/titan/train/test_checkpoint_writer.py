"""A checkpoint is there at once, and says of each file what was written to it."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from titan_relay.titan.hf.completion import (
    MARK,
    FileMark,
    check_sizes,
    file_mark,
    first_damage,
    read_mark,
    share_of,
)
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.train.checkpoint_folder import CheckpointFolder, damage_of, retire
from titan_relay.titan.train.checkpoint_writer import MarkingWriter, reason_of

STATE: dict[str, Any] = {"weight": torch.arange(5000.0), "bias": torch.ones(3), "step": {"n": 7}}


def save(folder: CheckpointFolder, step: int, state: dict[str, Any] = STATE) -> Path:
    dcp.save(dict(state), storage_writer=MarkingWriter(folder, step), no_dist=True)
    return folder.of_step(step)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoint")


def test_the_mark_holds_what_is_on_disk(folder: CheckpointFolder) -> None:
    path = save(folder, 20)
    there = {each.name: file_mark(each) for each in path.iterdir() if each.name != MARK}
    assert read_mark(path) == there
    assert set(there) == {".metadata", "__0_0.distcp"}
    assert damage_of(path) is None
    assert [each.name for each in folder.path.iterdir()] == ["step-20"]


def test_what_is_written_is_not_there_before_its_end(folder: CheckpointFolder) -> None:
    class Looking(MarkingWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            assert (folder.saving(1) / "__0_0.distcp").is_file()
            assert folder.complete() == {}
            super().finish(metadata, results)
            assert list(folder.complete()) == [1]

    dcp.save(dict(STATE), storage_writer=Looking(folder, 1), no_dist=True)


def test_a_writer_can_be_sent_to_another_process(folder: CheckpointFolder) -> None:
    writer = pickle.loads(pickle.dumps(MarkingWriter(folder, 3)))
    dcp.save(dict(STATE), storage_writer=writer, no_dist=True)
    assert damage_of(folder.of_step(3)) is None


def test_what_stands_in_the_way_gets_another_name(folder: CheckpointFolder) -> None:
    for _ in range(3):
        save(folder, 4)
    assert {each.name for each in folder.path.iterdir()} == {
        "step-4",
        "step-4.replaced",
        "step-4.replaced-2",
    }


def test_leftovers_are_what_a_killed_run_wrote_or_deleted(folder: CheckpointFolder) -> None:
    ours = [folder.saving(30), retire(save(folder, 10))]
    for name in ("step-30.saving", "step-x.saving", "best.saving", "step-030.deleting"):
        (folder.path / name).mkdir()
    (folder.path / "step-40.saving").write_text("a file")
    assert folder.leftovers() == sorted(ours)
    assert folder.steps() == {}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def fill_with_zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def swap_halves(file: Path) -> None:
    content = file.read_bytes()
    half = len(content) // 2
    file.write_bytes(content[half:] + content[:half])


@pytest.mark.parametrize("damage", [flip, fill_with_zeros, swap_halves])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_changed_content_is_found_by_its_checksum(
    damage: Any, name: str, folder: CheckpointFolder
) -> None:
    path = save(folder, 1)
    damage(path / name)
    check_sizes(path)
    marks = read_mark(path)
    assert marks is not None
    assert first_damage(path, marks, marks) == (
        f"{path} is damaged: {name} is not what was written (checksum)"
    )


def test_the_metadata_of_another_step_is_found(folder: CheckpointFolder) -> None:
    one, other = save(folder, 1), save(folder, 2)
    shutil.copy(one / ".metadata", other / ".metadata")
    marks = read_mark(other)
    assert marks is not None
    assert ".metadata is not what was written" in str(first_damage(other, marks, marks))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: os.truncate(path / "__0_0.distcp", 100), "__0_0.distcp is cut short, 100 "),
        (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
        (lambda path: (path / MARK).unlink(), f"{MARK} is missing"),
        (lambda path: (path / MARK).write_text("{"), f"{MARK} cannot be read"),
        (lambda path: (path / MARK).write_text('{"format": 1}'), f"{MARK} cannot be read"),
        (lambda path: (path / MARK).write_bytes(b"\xff\0"), f"{MARK} cannot be read"),
        (lambda path: (path / MARK).write_text('{"format": 2}'), "format 2, written by a newer"),
        (lambda path: [each.unlink() for each in path.iterdir()], "not written to its end"),
    ],
)
def test_what_is_seen_without_reading_weights(
    damage: Any, said: str, folder: CheckpointFolder
) -> None:
    path = save(folder, 1)
    damage(path)
    assert said in str(damage_of(path))


def test_a_checkpoint_from_before_there_were_marks_is_sound(tmp_path: Path) -> None:
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert damage_of(tmp_path / "step-1") is None
    assert read_mark(tmp_path / "step-1") is None


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_each_file_is_read_by_one_rank(world_size: int) -> None:
    files = {f"__{n}_0.distcp": FileMark(1000 + n % 3, n) for n in range(12)}
    shares = [share_of(files, rank, world_size) for rank in range(world_size)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_names_the_file_and_what_it_needs(folder: CheckpointFolder) -> None:
    large = {"weight": torch.zeros(1 << 19)}
    with files_of_at_most(100_000), pytest.raises(CheckpointException) as raised:
        save(folder, 5, large)
    reason = reason_of(raised.value)
    assert reason is not None
    assert reason.startswith(f"{folder.saving(5)}/__0_0.distcp: {os.strerror(errno.EFBIG)} ")
    assert "(it needs 2.00 MiB, " in reason
    assert folder.complete() == {}


def test_only_failures_of_files_are_told_as_such() -> None:
    assert reason_of(OSError(errno.EROFS, "Read-only file system", "a")) == (
        "a: Read-only file system"
    )
    assert reason_of(RuntimeError("a bug")) is None
    with pytest.raises(KeyboardInterrupt):
        reason_of(KeyboardInterrupt())


def test_a_file_that_is_gone_may_lie_on_another_node(folder: CheckpointFolder) -> None:
    path = save(folder, 1)
    (path / "__0_0.distcp").unlink()
    with pytest.raises(HfError, match=r"__0_0\.distcp is missing; if nodes had a folder each"):
        check_sizes(path)
