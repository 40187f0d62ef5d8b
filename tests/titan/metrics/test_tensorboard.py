"""Curves on disk: one point per step over kills and resumes, one run per folder."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from titan_relay.titan.metrics.folder_lock import LOCK_FILE_NAME, FolderError, FolderLock
from titan_relay.titan.metrics.tensorboard import CurveLogger, newest_file_time


def read(folder: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def write(folder: Path, first_step: int | None, steps: range, value: float) -> CurveLogger:
    logger = CurveLogger(folder, lambda: first_step)
    for step in steps:
        logger.log({"loss": value, "grad_norm": 1.0}, step)
    return logger


def test_a_resumed_run_has_one_point_per_step(tmp_path: Path) -> None:
    # Logged 1 to 8, then resumed after step 4 and logged 5 to 10, at once: in the same second.
    write(tmp_path, 1, range(1, 9), 1.0).close()
    watching = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    watching.Reload()
    assert len(watching.Scalars("loss")) == 8
    write(tmp_path, 5, range(5, 11), 2.0).close()
    expected = [(step, 1.0 if step < 5 else 2.0) for step in range(1, 11)]
    assert read(tmp_path, "loss") == expected
    assert [step for step, _ in read(tmp_path, "grad_norm")] == list(range(1, 11))
    # A TensorBoard that was open all the time agrees with a fresh one.
    watching.Reload()
    assert [(event.step, event.value) for event in watching.Scalars("loss")] == expected
    # Three files would mean a second file of one run.
    assert len(list(tmp_path.glob("events.*"))) == 2


def test_points_between_the_checkpoint_and_the_first_report_are_replaced(tmp_path: Path) -> None:
    # The first run reported 7; the second goes on after 6 and reports only every second step.
    write(tmp_path, 1, range(1, 8), 1.0).close()
    write(tmp_path, 7, range(8, 11, 2), 2.0).close()
    assert [step for step, _ in read(tmp_path, "loss")] == [1, 2, 3, 4, 5, 6, 8, 10]


def test_a_fresh_run_in_an_old_folder_replaces_the_old_curves(tmp_path: Path) -> None:
    write(tmp_path, 1, range(1, 9), 1.0).close()
    write(tmp_path, None, range(1, 3), 2.0).close()
    assert read(tmp_path, "loss") == [(1, 2.0), (2, 2.0)]


def test_nothing_is_written_before_the_first_point(tmp_path: Path) -> None:
    logger = CurveLogger(tmp_path, lambda: 1)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE_NAME]
    logger.close()


def test_points_are_on_disk_at_once(tmp_path: Path) -> None:
    logger = write(tmp_path, 1, range(1, 4), 1.0)
    # Read with the file still open, as after a kill.
    (file,) = tmp_path.glob("events.*")
    steps = [event.step for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]
    assert steps == [1, 1, 2, 2, 3, 3]
    logger.close()


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    first = CurveLogger(tmp_path, lambda: 1)
    with pytest.raises(FolderError, match="another run is writing") as error:
        CurveLogger(tmp_path, lambda: 1)
    message = str(error.value)
    assert "\n" not in message
    assert str(tmp_path) in message
    assert f"process {os.getpid()} on" in message
    assert "dump_folder" in message
    first.close()
    first.close()
    CurveLogger(tmp_path, lambda: 1).close()


def test_two_processes_cannot_share_a_folder_and_a_killed_one_leaves_no_lock(
    tmp_path: Path,
) -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from titan_relay.titan.metrics.folder_lock import FolderLock
        lock = FolderLock(Path(sys.argv[1]))
        print("locked", flush=True)
        time.sleep(60)
        """
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == "locked"
        with pytest.raises(FolderError, match=f"process {other.pid} on"):
            CurveLogger(tmp_path, lambda: 1)
    finally:
        other.kill()
        other.wait()
    assert (tmp_path / LOCK_FILE_NAME).exists(), "the file is left behind, the lock is not"
    CurveLogger(tmp_path, lambda: 1).close()


@pytest.mark.parametrize("wait_s", [0.0, 5.0])
def test_a_lock_waits_for_its_owner_and_then_says_since_when_it_is_held(
    tmp_path: Path, wait_s: float
) -> None:
    first = FolderLock(tmp_path)
    threading.Timer(0.5, first.release).start()
    if wait_s:
        FolderLock(tmp_path, wait_s).release()
    else:
        since = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d"
        with pytest.raises(FolderError, match=rf"process {os.getpid()} on .*, {since}\)"):
            FolderLock(tmp_path, wait_s)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="cannot be written to"):
        CurveLogger(tmp_path / "file" / "tb", lambda: 1)


def test_files_from_the_future_are_refused(tmp_path: Path) -> None:
    (tmp_path / f"events.out.tfevents.{int(time.time()) + 3600}.host.1.0").write_text("")
    with pytest.raises(FolderError, match="in the future"):
        CurveLogger(tmp_path, lambda: 1)
    assert newest_file_time(tmp_path) > time.time() + 3000
    assert newest_file_time(tmp_path / "absent") == 0
