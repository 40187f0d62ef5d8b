"""What a process makes of the launcher that started it, or of a batch system without one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import ROOT
from tests.titan.runs import config_file, write_data
from titan_relay.cli import main
from titan_relay.launcher import place_among_ranks, say_error


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "x"}, 'environment: RANK = "x": must be a whole number'),
        ({"RANK": "-1"}, 'environment: RANK = "-1": must be a whole number'),
        ({"RANK": "0", "WORLD_SIZE": "two"}, 'environment: WORLD_SIZE = "two"'),
        ({"RANK": "0", "LOCAL_RANK": ""}, 'environment: LOCAL_RANK = ""'),
        ({"RANK": "00", "WORLD_SIZE": "0"}, "RANK = 0: must be below WORLD_SIZE, which is 0"),
    ],
)
def test_an_environment_that_no_launcher_makes_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    words: str,
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert main(["train", "--config", "unread.toml"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
TRAIN = "-m titan_relay train --config 'a b.toml'"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, f"torchrun --nproc_per_node 2 {TRAIN}"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_NTASKS = 2: each of these tasks"),
        (
            {**SRUN, "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "1"},
            "SLURM_STEP_NUM_TASKS = 8: each of these tasks",
        ),
        (
            {
                **SRUN,
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
            },
            "one task a node: torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint HOST:29400 "
            f"--nproc_per_node 4 {TRAIN}",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"},
            "OMPI_COMM_WORLD_SIZE = 4: each of these tasks",
        ),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "to train in this task alone, unset PMI_RANK"),
    ],
)
def test_tasks_without_a_launcher_are_told_to_use_torchrun(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    words: str,
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert main(["train", "--config", "a b.toml"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},  # a shell of salloc
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a script of sbatch
        {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
        {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "x", "WORLD_SIZE": "4", "LOCAL_RANK": "3"},
    ],
    ids=["plain", "salloc", "sbatch", "srun-n1", "srun", "mpirun-n1", "odd"],
)
def test_a_process_alone_in_its_task_is_one_rank(environment: dict[str, str]) -> None:
    assert place_among_ranks(environment, ()) == (0, 1)


def test_a_rank_of_torchrun_below_srun_is_what_torchrun_says() -> None:
    environment = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert place_among_ranks({**environment, "RANK": "5", "WORLD_SIZE": "8"}, ()) == (5, 8)


def torchrun(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Two ranks of a run whose file is named after the rank; torchrun's code, output, last words.

    The last words are what it shows as the root cause.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc_per_node", "2", "-m", "titan_relay", "train", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    report = done.stderr.rpartition("Root Cause")[2]
    (words,) = re.findall(r"traceback : (.*)", report)
    return done.returncode, done.stdout + done.stderr, words


def files_by_rank(folder: Path, *changes: str) -> str:
    """A configuration whose text differs between ranks; returns its name for all of them."""
    write_data(folder)
    text = config_file(folder).read_text()
    for rank, change in enumerate(changes):
        (folder / f"{rank}.toml").write_text(f'dump_folder = "{folder}/out"\n{text}\n{change}\n')
    return "--config=$RANK.toml"


def test_torchrun_ends_with_the_mistake_of_the_one_rank_that_made_it(tmp_path: Path) -> None:
    """As where one node has an old copy of the file: rank 0 has nothing to say."""
    code, output, words = torchrun(tmp_path, files_by_rank(tmp_path, "", "[trainign]"))
    assert code == 1
    assert words == "error: 1.toml: [trainign]: unknown section; did you mean [training]?"
    assert "To enable traceback" not in output
    assert "titan_relay/" not in output  # no traceback of ours


@pytest.mark.slow
def test_torchrun_ends_with_the_cause_and_not_with_who_lost_a_rank(tmp_path: Path) -> None:
    name = files_by_rank(tmp_path, "", "")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(corpus.read_text() + "{broken\n" * 60)
    text = (tmp_path / "1.toml").read_text()
    (tmp_path / "1.toml").write_text(text.replace("[data]", '[data]\nbad_documents = "stop"'))
    code, output, words = torchrun(tmp_path, name)
    assert code == 1
    assert re.match(r"error: rank 1: .*corpus.jsonl.*", words), words
    assert "another rank has died" in output  # what rank 0 saw of it, and said


def test_the_launcher_is_told_what_came_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    say_error("the cause")
    say_error("what came of it")
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "error: the cause"
    assert int(message["extraInfo"]["timestamp"]) > 0
    assert capsys.readouterr().err == "error: the cause\nerror: what came of it\n"
