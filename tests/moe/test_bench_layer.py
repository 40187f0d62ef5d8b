"""``scripts/bench_layer.py`` runs every implementation and writes what it promises."""

import json
import subprocess
import sys
from pathlib import Path

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
    [(["--ep", "3"], "must be divisible by --ep 3"), (["--top-k", "9"], "must be at most")],
)
def test_impossible_sizes_are_refused(args, message):
    command = [sys.executable, str(SCRIPT), *SIZES, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert message in done.stderr
