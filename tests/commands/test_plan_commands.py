"""`titan-relay plan` and `longest` as a user starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import ROOT, run_cli
from tests.titan.runs import config_file
from titan_relay.cli import main
from titan_relay.commands.variants import VARIANTS, runs_of
from titan_relay.config import ConfigError

# With the tests' narrow experts and whole logits, loss and attention would limit both alike.
EXPERTS_MATTER = ["--loss.name", "chunked_cross_entropy"]
EXPERTS_MATTER += ["--model.moe.top_k", "6", "--model.moe.expert_dim", "96"]


@pytest.fixture(autouse=True)
def gpus_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a command hides comes back."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


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
        (["--device", "cpu", "--picture", "a.doc"], "a.doc: must end in one of .svg, .png, .pdf"),
        (["--device", "cpu", "--picture", "."], ".: is a folder; name a file"),
        (["--device", "cpu", "--picture", "/dev/null/a.svg"], "/dev/null is no folder"),
        (["--device", "cpu", "--rank", "x"], "--rank x: must be a whole number"),
        (["--device", "1e300"], "unknown device '1e300'"),
    ],
)
def test_a_wrong_question_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    config = str(config_file(tmp_path))
    assert main(["plan", "--config", config, "--world-size", "2", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--world-size", "0"], "--world-size 0: must be a whole number of at least 1"),
        (["--budget-mib", "nan"], "--budget-mib nan: must be a number above 0"),
        (["--budget-mib", "-3"], "--budget-mib -3: must be a number above 0"),
        (["--variants", "relay-recompute,x"], "--variants 'x' is none of"),
        (
            ["--variants", "relay-host,relay-host"],
            "--variants 'relay-host' is there twice",
        ),
        (["--world-size", "two"], "--world-size two: must be a whole number"),
        (["--word-size", "2"], "--word-size: no such option; did you mean --world-size?"),
        ([], "--device is missing"),
        (["--device", "1", "--budget-mib", "9"], "the budget of --measure"),
        (["--device", "1", "--for-layers", "9", "--json"], "leave out --json"),
        (["--measure"], "--measure needs --budget-mib"),
        (["--measure", "--device", "1"], "--device 1: --measure runs on this machine's CPU"),
    ],
)
def test_arguments_that_are_wrong_or_would_do_nothing(
    capsys: pytest.CaptureFixture[str], wrong: list[str], words: str
) -> None:
    assert main(["longest", "--config", "unread.toml", "--world-size", "2", *wrong]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("keys", "seq_len", "words"),
    [
        (["--parallelism.pipeline_parallel_degree", "2"], None, "must be 1 here: one sequence at"),
        (["--parallelism.context_parallel_degree", "2"], 63, "training.seq_len = 63"),
        (["--model.dimm", "8"], None, "model.dimm"),
    ],
)
def test_runs_that_no_variant_can_do_are_refused(
    tmp_path: Path, keys: list[str], seq_len: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        runs_of(["relay-recompute"], str(config_file(tmp_path)), keys, 2, seq_len)


def test_a_run_for_the_relay_can_be_compared(tmp_path: Path) -> None:
    keys = ["--relay.deterministic", "true", "--relay.kernels", "torch"]
    keys += ["--attention_retention.mode", "auto", "--attention_retention.budget_gib", "1"]
    assert list(runs_of(VARIANTS, str(config_file(tmp_path)), keys, 2)) == list(VARIANTS)


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_plan_needs_no_package_that_writes_curves(tmp_path: Path, package: str) -> None:
    program = f"import sys; sys.modules['{package}'] = None; from titan_relay.cli import main; "
    arguments = ["plan", "--config", str(config_file(tmp_path)), "--world-size", "2"]
    arguments += ["--device", "cpu", f"--metrics.enable_{package}", "true"]
    done = subprocess.run(
        [sys.executable, "-c", program + "sys.exit(main(sys.argv[1:]))", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "MiB" in done.stdout


def test_a_run_that_does_not_fit_gets_changes_and_a_picture(tmp_path: Path) -> None:
    config, picture = str(config_file(tmp_path)), tmp_path / "step.svg"
    arguments = ["--config", config, "--world-size", "2", "--device", "0.001", "--json"]
    arguments += ["--picture", str(picture), "--relay.dispatcher", "alltoall"]
    done = run_cli(*arguments, command="plan")
    assert done.returncode == 1, done.stderr
    plan = json.loads(done.stdout)
    assert plan["fits"] is False
    assert plan["worst_routing_peak_bytes"] == plan["peak_bytes"], "one rank's experts are all"
    assert plan["changes"]
    assert "<svg" in picture.read_text()


def test_the_longest_sequence_over_plans(tmp_path: Path) -> None:
    config = str(config_file(tmp_path))
    arguments = ["--config", config, "--world-size", "2", "--device", "0.03", "--json"]
    arguments += ["--parallelism.expert_parallel_degree", "2"]
    arguments += ["--variants", "alltoall-full-recompute,relay-recompute"]
    arguments += EXPERTS_MATTER
    rows = json.loads(run_cli(*arguments, command="longest").stdout)
    assert set().union(*rows) == {"variant", "max_seq_len", "peak_bytes", "limited_by"}
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
    done = subprocess.run(
        [sys.executable, "-m", "titan_relay", "longest", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    baseline, relay = json.loads(done.stdout)
    assert relay["max_seq_len"] > baseline["max_seq_len"] > 0
