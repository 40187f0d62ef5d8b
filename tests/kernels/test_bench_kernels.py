"""The scripts that need a GPU: what they say without one, and that they run from end to end."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench_kernels
import check_ring
import tune_kernels
from kernel_bench.compare import largest_error
from kernel_bench.search import search
from relay_kernels.tuning import TunedConfig, trial, tuned_config

ROOT = Path(__file__).resolve().parents[2]
# Which of the two runs kernels is decided when triton is imported, for the whole process.
by_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU kernels run on it, not by the interpreter"
)


def gpu_check(*arguments, cwd=None, **environment):
    # The script interprets where it should, and compiles where it should.
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=580,
        cwd=cwd,
        env={**inherited, "PYTHON": sys.executable, **environment},
    )


@pytest.mark.parametrize(
    ("script", "arguments"), [(bench_kernels, []), (tune_kernels, ["--out", "unused.toml"])]
)
def test_without_a_gpu_one_line_says_so(capsys, monkeypatch, script, arguments):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "needs a CUDA device, and there is none; --interpret tries" in lines[0]


def test_the_check_of_a_gpu_is_refused_without_one(tmp_path):
    report = tmp_path / "reports" / "report.md"
    done = gpu_check(report, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert not report.parent.exists()
    assert done.stderr.count("\n") == 1
    assert "no torch with a CUDA device; --interpret tries the script out" in done.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (bench_kernels, ["--tokens", "-1"], "--tokens: -1: must be a whole number of at least 1"),
        (bench_kernels, ["--skew", "nan"], "--skew: nan: must be a number of at least 0"),
        (bench_kernels, ["--json", "/proc/x.json"], "/proc/x.json: cannot be written"),
        (tune_kernels, ["--out", "/proc/x.toml"], "/proc/x.toml: cannot be written"),
        (check_ring, ["--tokens", "0"], "--tokens: 0: must be a whole number of at least 1"),
    ],
)
def test_a_mistake_is_told_before_any_work(capsys, script, arguments, message):
    with pytest.raises(SystemExit) as ended:
        script.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("report", [Path("/"), Path("/proc/there/report.md")])
def test_a_report_that_cannot_be_written_is_told_first(report):
    done = gpu_check("--interpret", report, PYTHON="true")
    assert done.returncode == 2
    assert done.stderr == f"error: {report}: the report cannot be written there\n"


def test_paths_are_meant_from_where_the_script_is_called(tmp_path):
    (tmp_path / "python").symlink_to("/bin/true")
    done = gpu_check("--interpret", "report.md", PYTHON="./python", cwd=tmp_path)
    assert done.returncode == 0
    assert "5 sections, 0 not ok" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interpet"], "error: --interpet: unknown option; known: --interpret, --help\n"),
        (["a.md", "b.md"], "error: b.md: one report is written, and a.md is named already\n"),
    ],
)
def test_the_check_of_a_gpu_refuses_what_it_does_not_know(arguments, message):
    done = gpu_check(*arguments)
    assert (done.returncode, done.stderr) == (2, message)


def test_the_check_of_a_gpu_explains_itself():
    done = gpu_check("--help")
    assert done.returncode == 0
    assert "--interpret [REPORT.md]" in done.stdout


@by_interpreter
def test_the_benchmark_runs_from_end_to_end_by_the_interpreter(capsys, tmp_path):
    file = tmp_path / "out.json"
    arguments = ["--interpret", "--preset", "qwen3-30b-a3b", "--json", str(file)]
    assert bench_kernels.main(arguments) == 0
    names = [row["name"] for row in json.loads(file.read_text())]
    assert "| unfused forward |" in capsys.readouterr().out
    ops = {"up_gate", "down_scatter", "hidden_backward", "dx_scatter", "weight_gradients"}
    assert {f"op {name}" for name in ops} <= set(names)
    assert sum(name.startswith("relay ") for name in names) == 4  # two directions, two orders


@by_interpreter
def test_tuning_writes_a_whole_configuration_file(tmp_path):
    file = tmp_path / "interpreter.toml"
    assert tune_kernels.main(["--interpret", "--kernel", "down", "--out", str(file)]) == 0
    written = tomllib.loads(file.read_text())
    own = ROOT / "kernels" / "relay_kernels" / "configs" / "interpreter.toml"
    for kernel, classes in tomllib.loads(own.read_text()).items():
        assert written[kernel].keys() >= classes.keys()
        for name, widths in classes.items():
            for width, values in widths.items():
                assert values.items() <= written[kernel][name][width].items()


def test_a_trial_ends_with_what_was_there():
    dtype, before = torch.bfloat16, tuned_config("down", "sm_90", "narrow", torch.bfloat16)
    with trial("down", "sm_90", "wide", dtype, replace(before, num_warps=16)):
        assert tuned_config("down", "sm_90", "wide", dtype).num_warps == 16
        assert tuned_config("down", "sm_90", "narrow", dtype) == before
    assert tuned_config("down", "sm_90", "narrow", dtype) == before
    assert tuned_config("down", "sm_90", "wide", dtype).num_warps != 16


def test_the_search_finds_the_best_of_independent_parameters():
    tried = []

    def measure(config):
        tried.append(config)
        if config.constexprs["BLOCK_M"] == 256:
            return None  # does not fit
        return abs(config.constexprs["BLOCK_M"] - 128) + abs(config.num_warps - 8) + 1.0

    found = search(TunedConfig({"BLOCK_M": 64, "OTHER": 3}, num_warps=4, num_stages=3), measure)
    assert found.config == TunedConfig({"BLOCK_M": 128, "OTHER": 3}, num_warps=8, num_stages=3)
    assert (found.begin_ms, found.best_ms) == (69.0, 1.0)
    keys = [(tuple(each.constexprs.items()), each.num_warps, each.num_stages) for each in tried]
    assert len(set(keys)) == len(keys)  # compiling is what costs


def test_the_search_needs_something_that_runs():
    with pytest.raises(ValueError, match="does not run"):
        search(TunedConfig({}), lambda config: None)


def test_a_nan_is_thelargest_error():
    truth = [torch.ones(2), torch.ones(2)]
    error = largest_error([torch.tensor([1.0, float("nan")]), torch.tensor([1.5, 1.0])], truth)
    assert error != error


def test_failing_sections_do_not_stop_the_others(tmp_path):
    report = tmp_path / "new" / "report.md"
    done = gpu_check("--interpret", report, PYTHON="false")
    assert done.returncode == 1
    assert report.read_text().count("| **failed** (1) |") == 5
    assert "5 sections, 5 not ok" in done.stderr


def test_sections_end_in_time(tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    done = gpu_check("--interpret", tmp_path / "r.md", PYTHON=str(slow), GPU_CHECK_TOTAL_S="1")
    assert done.returncode == 1
    assert (tmp_path / "r.md").read_text().count("| **out of time** |") == 5


@pytest.mark.slow
@by_interpreter
def test_the_whole_check_runs_by_the_interpreter(tmp_path):
    report = tmp_path / "report.md"
    done = gpu_check("--interpret", report)
    assert done.returncode == 0, report.read_text()
    assert "\n5 sections, 0 not ok, " in report.read_text()
