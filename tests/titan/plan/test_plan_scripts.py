"""The planner's scripts as a user starts them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.titan.runs import config_file

ROOT = Path(__file__).resolve().parents[3]
# With the tests' narrow experts and whole logits, loss and attention would limit both alike.
EXPERTS_MATTER = ["--loss.name", "chunked_cross_entropy"]
EXPERTS_MATTER += ["--model.moe.top_k", "6", "--model.moe.expert_dim", "96"]


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
    assert done.returncode == code, done.stderr
    return done


def fields(rows: list[dict[str, Any]]) -> set[str]:
    return set().union(*rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "h100"], "unknown device 'h100'; did you mean h100-80g? name one of a100"),
        (["--device", "cpu", "--rank", "7"], "--rank 7: must be from 0 to 1, below --world-size"),
        (["--device", "cpu", "--training.stepz", "3"], "training.steps"),
        (["--device", "cpu", "--skew", "2"], "--skew 2: the relay's memory is the same for every"),
        (
            ["--device", "cpu", "--seq-len", "64", "--training.seq_len", "64"],
            "--seq-len 64: --training.seq_len is there, too",
        ),
    ],
)
def test_a_wrong_question_is_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    config = str(config_file(tmp_path))
    done = script("plan.py", "--config", config, "--world-size", "2", *arguments, code=2)
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world-size", "2", "--device", "1", "--budget-mib", "9"], "the budget of --measure"),
        (["--world-size", "2"], "--device is missing"),
    ],
)
def test_options_of_the_search_that_would_do_nothing(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that what the import hides comes back
    import max_seq_len

    args, _ = max_seq_len.parse(["--config", "unread.toml", *arguments])
    with pytest.raises(ValueError, match=words):
        max_seq_len.check(args)


@pytest.mark.parametrize("name", ["max_seq_len", "bench_budget"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--world-size", "0"], "argument --world-size: 0 must be at least 1"),
        (["--budget-mib", "nan"], "argument --budget-mib: nan must be a number above 0"),
        (["--budget-mib", "-3"], "argument --budget-mib: -3 must be a number above 0"),
        (["--variants", "relay-recompute,x"], "argument --variants: 'x' is none of"),
        (
            ["--variants", "relay-host,relay-host"],
            "--variants: 'relay-host' is there twice",
        ),
        (["--world-size", "two"], "argument --world-size: 'two' is not a whole number"),
        (["--word-size", "2"], "--word-size: no such option; did you mean --world-size?"),
    ],
)
def test_arguments_out_of_range(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    wrong: list[str],
    words: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that what the import hides comes back
    given = ["--config", "unread.toml", "--world-size", "2", "--budget-mib", "100", *wrong]
    with pytest.raises(SystemExit):
        importlib.import_module(name).parse(given)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--world-size", "0"], "argument --world-size: 0 must be at least 1"),
        (["--json", "no/such/folder/x.json"], "no/such/folder/x.json: there is no such folder"),
        (["--json", "."], ".: is a folder; name a file in it"),
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

    monkeypatch.setattr(check_plan, "all_cases", lambda *_: [])
    assert check_plan.main([str(config_file(tmp_path)), "--world-size", "7"]) == 2
    assert "error: --world-size 7: no combination" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "seq_len", "words"),
    [
        (["--parallelism.pipeline_parallel_degree", "2"], None, "must be 1 here: one sequence at"),
        (["--parallelism.context_parallel_degree", "2"], 63, "training.seq_len = 63"),
        (["--model.dimm", "8"], None, "model.dimm"),
    ],
)
def test_runs_that_no_variant_can_do_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: list[str],
    seq_len: int | None,
    words: str,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from longest.runs import checked_run

    with pytest.raises(ValueError, match=words):
        checked_run(str(config_file(tmp_path)), keys, ["relay-recompute"], 2, seq_len)


def test_a_run_for_the_relay_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from longest.runs import checked_run

    from titan_relay.titan.plan.variants import VARIANTS

    keys = ["--relay.deterministic", "true", "--relay.kernels", "torch"]
    keys += ["--attention_retention.mode", "auto", "--attention_retention.budget_gib", "1"]
    checked_run(str(config_file(tmp_path)), keys, list(VARIANTS), 2)


def test_a_picture_is_no_folder(tmp_path: Path) -> None:
    arguments = ["--config", str(config_file(tmp_path)), "--world-size", "1", "--device", "cpu"]
    done = script("plan.py", *arguments, "--picture", str(tmp_path), code=2)
    assert "is a folder; name a file in it" in done.stderr


def test_a_picture_needs_a_folder(tmp_path: Path) -> None:
    arguments = ["--config", str(config_file(tmp_path)), "--world-size", "1", "--device", "cpu"]
    done = script("plan.py", *arguments, "--picture", str(tmp_path / "no" / "a.svg"), code=2)
    assert "there is no such folder" in done.stderr


def test_a_run_that_does_not_fit_gets_changes_and_a_picture(tmp_path: Path) -> None:
    config, picture = str(config_file(tmp_path)), tmp_path / "step.svg"
    arguments = ["--config", config, "--world-size", "2", "--device", "0.001", "--json"]
    arguments += ["--picture", str(picture), "--relay.dispatcher", "alltoall"]
    plan = json.loads(script("plan.py", *arguments, code=1).stdout)
    assert plan["fits"] is False
    assert plan["worst_routing_peak_bytes"] == plan["peak_bytes"], "one rank's experts are all"
    assert plan["changes"]
    assert picture.read_text().startswith("<svg")


def test_the_longest_sequence_over_plans(tmp_path: Path) -> None:
    config = str(config_file(tmp_path))
    arguments = ["--config", config, "--world-size", "2", "--device", "0.03", "--json"]
    arguments += ["--parallelism.expert_parallel_degree", "2"]
    arguments += ["--variants", "alltoall-full-recompute,relay-recompute"]
    arguments += EXPERTS_MATTER
    rows = json.loads(script("max_seq_len.py", *arguments).stdout)
    assert fields(rows) == {"variant", "max_seq_len", "peak_bytes", "limited_by"}
    baseline, relay = rows
    assert relay["max_seq_len"] > baseline["max_seq_len"] > 0
    assert max(row["peak_bytes"] for row in rows) <= 0.03 * 2**30


@pytest.mark.slow
def test_the_longest_sequence_over_real_steps(tmp_path: Path) -> None:
    config = str(config_file(tmp_path))
    arguments = ["--config", config, "--world-size", "2", "--measure", "--budget-mib", "12"]
    arguments += ["--json", "--parallelism.expert_parallel_degree", "2"]
    arguments += ["--variants", "alltoall-full-recompute,relay-recompute"]
    arguments += EXPERTS_MATTER
    arguments += ["--debug.moe_force_load_balance"]
    baseline, relay = json.loads(script("max_seq_len.py", *arguments).stdout)
    assert relay["max_seq_len"] > baseline["max_seq_len"] > 0


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for child processes")
def test_ranks_end_with_their_script(tmp_path: Path) -> None:
    # A rank that waits for another, started as a shell's background job is, which ignores SIGINT.
    program = (
        "import sys, torch.multiprocessing as mp; from longest.ranks import start_rank\n"
        "mp.spawn(start_rank, args=(2, sys.argv[1]), nprocs=1)"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "scripts")])
    parent = subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
    )
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    _wait_until((tmp_path / "rendezvous").exists)
    ranks = [Path(f"/proc/{pid}") for pid in children.read_text().split()]
    parent.kill()
    parent.wait()
    _wait_until(lambda: not any(_runs(rank) for rank in ranks))


def _runs(process: Path) -> bool:
    """Whether it does, and not just waits to be noticed by the process that inherited it."""
    try:
        return ") Z" not in (process / "stat").read_text()
    except FileNotFoundError:
        return False


def _wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_plans_hold_over_dispatchers_levels_and_degrees() -> None:
    done = script("check_plan.py", "train_configs/qwen3_30b_a3b_tiny.toml", "--world-size", "4")
    assert "off." in done.stdout
