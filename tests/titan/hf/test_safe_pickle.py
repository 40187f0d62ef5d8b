"""A checkpoint's files are data: nothing that they name is run, whoever reads them."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.payload import Payload
from titan_relay.titan.hf.dcp import PartsReader
from titan_relay.titan.hf.errors import HfError
from titan_relay.titan.hf.safe_pickle import METADATA, SafeLoadPlanner, SafeReader, unpickle

VALUES: dict[str, Any] = {"weight": torch.arange(6.0).reshape(2, 3), "state": {"lane": [1, "a"]}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(dict(VALUES), checkpoint_id=tmp_path / "step-1", no_dist=True)
    return tmp_path / "step-1"


def load(checkpoint: Path | str, state: dict[str, Any]) -> dict[str, Any]:
    reader = SafeReader(checkpoint)
    dcp.load(state, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=True)
    return state


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_what_was_saved_is_read(prefix: str, saved: Path) -> None:
    state = load(f"{prefix}{saved}", {"weight": torch.zeros(2, 3), "state": {"lane": [0, ""]}})
    assert torch.equal(state["weight"], VALUES["weight"])
    assert state["state"] == VALUES["state"]


def test_metadata_that_names_a_function_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    payload = Payload(tmp_path / "ran")
    (saved / METADATA).write_bytes(pickle.dumps(payload))
    with pytest.raises(HfError, match=r"\.metadata names (posix|nt)\.mkdir, .* nothing .* run$"):
        PartsReader(saved)
    assert not payload.has_run


def test_a_function_inside_sound_metadata_is_not_run_either(saved: Path, tmp_path: Path) -> None:
    payload = Payload(tmp_path / "ran")
    metadata = SafeReader(saved).read_metadata()
    metadata.planner_data = payload
    (saved / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(HfError, match="nothing of it was run"):
        PartsReader(saved)
    assert not payload.has_run


@pytest.mark.parametrize(
    "pickled",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.serialization\nload\n.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n.",
        b"cpickle\nloads\n.",
    ],
)
def test_names_of_no_metadata_are_refused(pickled: bytes) -> None:
    with pytest.raises(HfError, match=r"^here names "):
        unpickle(io.BytesIO(pickled), "here")


@pytest.mark.parametrize("garbage", [b"", b"xyz", bytes(100), pickle.dumps(3), pickle.dumps({})])
def test_garbage_is_one_line(garbage: bytes, saved: Path) -> None:
    (saved / METADATA).write_bytes(garbage)
    with pytest.raises(HfError, match=r"\.metadata is damaged"):
        PartsReader(saved)


@pytest.mark.parametrize("name", ["../other.distcp", "/etc/hostname"])
def test_a_file_outside_the_folder_is_refused(name: str, saved: Path) -> None:
    metadata = SafeReader(saved).read_metadata()
    for each in metadata.storage_data.values():
        each.relative_path = name
    (saved / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(HfError, match="outside its folder"):
        PartsReader(saved)


def test_an_entry_that_names_a_function_is_refused_and_not_run(tmp_path: Path) -> None:
    payload = Payload(tmp_path / "ran")
    dcp.save({"state": payload}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(dcp.CheckpointException, match=r"the entry state .* was not run"):
        load(tmp_path / "step-1", {"state": 0})
    assert not payload.has_run


def test_a_payload_would_run_in_a_usual_reader(tmp_path: Path) -> None:
    """So that the tests above can fail."""
    payload = Payload(tmp_path / "ran")
    pickle.loads(pickle.dumps(payload))
    assert payload.has_run
    assert os.path.isdir(tmp_path / "ran")
