"""The built wheel, installed alone: every command a user types works, from another folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import ROOT
from tests.titan.hf.folders import run_of, write_folder
from tests.titan.runs import config_file, write_data
from titan_relay.cli import COMMANDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel holds, and its console script."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("titan_relay", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    # Without isolation, so that nothing is downloaded.
    command += ["--no-build-isolation", "--target", str(folder / "site"), str(source)]
    subprocess.run(command, check=True, timeout=300)
    return folder / "site"


def call(installed: Path, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(installed / "bin" / "titan-relay"), *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_it_is_the_wheel_that_runs(installed: Path, tmp_path: Path) -> None:
    program = "import titan_relay, relay_kernels; print(titan_relay.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(done.stdout.strip()).is_relative_to(installed)
    assert (installed / "relay_kernels" / "configs" / "sm_90.toml").is_file()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there(installed: Path, tmp_path: Path, command: str) -> None:
    assert f"titan-relay {command} " in call(installed, tmp_path, command, "--help")


def test_data_and_tokenizer(installed: Path, tmp_path: Path) -> None:
    call(installed, tmp_path, "corpus", "--out", "corpus", "--max-bytes", "200000")
    files = ["--files", "corpus/train.jsonl", "--out", "tokenizer.tiktoken"]
    said = call(installed, tmp_path, "tokenizer", *files, "--vocab-size", "300")
    assert "trained 299 ranks" in said


def test_count_plan_and_a_short_run(installed: Path, tmp_path: Path) -> None:
    write_data(tmp_path)
    config = ["--config", str(config_file(tmp_path))]
    assert "parameters:" in call(installed, tmp_path, "count", *config)
    on_one = [*config, "--training.local_batch_size", "8"]
    plan = call(installed, tmp_path, "plan", *on_one, "--world-size", "1", "--device", "cpu")
    assert "MiB" in plan
    assert "step: 2/2" in call(installed, tmp_path, "train", *on_one, "--training.steps", "2")


def test_a_conversion_there_and_back(installed: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "hf")
    run_of(tmp_path / "hf")
    config = ["--config", "hf.toml"]
    from_hf = ["--hf-dir", "hf", "--out", "checkpoint"]
    call(installed, tmp_path, "convert", "from-hf", *from_hf, *config)
    to_hf = ["--checkpoint", "checkpoint", "--out", "out"]
    assert "done in" in call(installed, tmp_path, "convert", "to-hf", *to_hf, *config)
    assert (tmp_path / "out" / "config.json").is_file()
