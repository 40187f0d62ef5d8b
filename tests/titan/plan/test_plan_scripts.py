"""`check_plan` and `bench_budget` as a developer starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.titan.runs import config_file

ROOT = Path(__file__).resolve().parents[3]


def script(name: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, f"scripts/{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--world-size", "0"], "--world-size: 0: must be a whole number of at least 1"),
        (["--json", "/dev/null/x.json"], "cannot be written: /dev/null is no folder"),
        (["--json", "."], ".: is a folder; name a file"),
    ],
)
def test_a_check_of_plans_looks_at_its_arguments_first(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: list[str],
    words: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that what the import hides comes back
    import check_plan

    with pytest.raises(SystemExit):
        check_plan.parse(["unread.toml", *wrong])
    assert words in capsys.readouterr().err


def test_a_check_of_no_plans_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that what the import hides comes back
    import check_plan

    config = config_file(tmp_path)
    config.write_text(config.read_text() + "[parallelism]\ntensor_parallel_degree = 3\n")
    assert check_plan.main([str(config), "--world-size", "2"]) == 2
    assert "error: --world-size 2: no combination" in capsys.readouterr().err


def test_a_budget_looks_at_its_arguments_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that what the import hides comes back
    import bench_budget

    given = ["--config", "unread.toml", "--world-size", "2", "--budget-mib", "-3"]
    with pytest.raises(SystemExit):
        bench_budget.parse(given)
    assert "--budget-mib: -3: must be a number above 0" in capsys.readouterr().err


@pytest.mark.slow
def test_throughput_within_one_budget(tmp_path: Path) -> None:
    config = str(config_file(tmp_path))
    arguments = ["--config", config, "--world-size", "2", "--budget-mib", "12", "--json"]
    arguments += ["--parallelism.expert_parallel_degree", "2", "--turns", "1"]
    arguments += ["--training.steps", "1"]  # fewer than the steps of a turn
    arguments += ["--profile", "3"]
    rows = json.loads(script("bench_budget.py", *arguments).stdout)
    assert {row["variant"] for row in rows} == {"alltoall-full-recompute", "relay-recompute"}
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert all(0 < share["share"] < 1 for row in rows for share in row["shares"])
    assert all(len(row["shares"]) == 3 for row in rows)
    assert max(row["peak_bytes"] for row in rows) <= 12 * 2**20


@pytest.mark.slow
def test_a_budget_in_which_nothing_fits_is_one_error(tmp_path: Path) -> None:
    arguments = ["--config", str(config_file(tmp_path)), "--world-size", "1", "--seq-len", "64"]
    done = script("bench_budget.py", *arguments, "--budget-mib", "0.01", code=2)
    assert "--budget-mib 0.01: the variants do not fit at this length; give more" in done.stderr


@pytest.mark.slow
def test_plans_hold_over_dispatchers_levels_and_degrees() -> None:
    done = script("check_plan.py", "train_configs/qwen3_30b_a3b_tiny.toml", "--world-size", "4")
    assert "off." in done.stdout
