"""What a process makes of the launcher that started it, or of a batch system without one."""

import pytest

from titan_relay.cli import main
from titan_relay.launcher import place_among_ranks


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
