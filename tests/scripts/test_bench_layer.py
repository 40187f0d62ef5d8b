"""``scripts/bench_layer.py`` runs every implementation and writes what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import bench_layer
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_layer.py"
SIZES = [
    *("--tokens", "64", "--dim", "32", "--expert-dim", "16", "--experts", "8", "--top-k", "2"),
    *("--iters", "1", "--device", "cpu"),
]
FIGURES = ("saved_bytes", "peak_bytes", "median_ms", "max_rel_err", "sent_bytes", "wait_ms")


def bench(tmp_path, *args):
    out = tmp_path / "out.json"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *SIZES, *args, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {result["impl"]: result for result in json.loads(out.read_text())}


def check(results, names):
    assert list(results) == names
    for result in results.values():
        assert all(result[name] >= 0 for name in FIGURES)
        # Float32 everywhere; a wrong layer is off by far more.
        assert result["max_rel_err"] < 1e-5


def test_relay_and_torchtitan(tmp_path):
    names = ["relay-experts", "relay-tokens", "relay-auto", "torchtitan", "torchtitan-recompute"]
    results = bench(tmp_path, "--skew", "1.0", "--impl", *names)
    check(results, names)
    # Weights out, and weights and gradients back: 4 experts of 3 * 32 * 16 float32 elements.
    assert results["relay-experts"]["sent_bytes"] == 3 * 4 * 3 * 32 * 16 * 4
    assert results["relay-auto"]["saved_bytes"] < results["torchtitan"]["saved_bytes"] / 4
    assert results["torchtitan-recompute"]["saved_bytes"] < results["torchtitan"]["saved_bytes"]


@pytest.mark.slow
def test_megatron(tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is in the bench extra")
    names = ["megatron", "megatron-recompute", "megatron-grouped"]
    check(bench(tmp_path, "--impl", *names), names)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ep", "3"], "must be divisible by --ep 3"),
        (["--top-k", "9"], "must be at most"),
        (["--ep", "0"], "--ep: 0: must be a whole number of at least 1"),
        (["--iters", "0"], "--iters: 0: must be a whole number of at least 1"),
        (["--warmup", "-1"], "--warmup -1 must be at least 0"),
        (["--num-slices", "0"], "--num-slices: 0: must be a whole number of at least 1"),
        (["--skew", "nan"], "--skew: nan: must be a number of at least 0"),
        (["--scale", "0.5"], "--scale 0.5 shrinks a --preset"),
        (["--impl", "relay-auto", "relay-auto"], "names one twice"),
        (
            ["--preset", "phi-3.5-moe", "--scale", "1e-5"],
            "--scale 1e-05 leaves nothing of --preset phi-3.5-moe",
        ),
        (["--json", "/dev/null/a.json"], "cannot be written: /dev/null is no folder"),
    ],
)
def test_arguments_are_refused_before_ranks_start(args, message, capsys):
    with pytest.raises(SystemExit) as refused:
        bench_layer.parse([*SIZES, *args])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit):
        bench_layer.parse([*SIZES, "--device", "cuda", "--ep", "2"])
    assert "--device cuda: --ep 2 needs as many GPUs; 1 here" in capsys.readouterr().err
