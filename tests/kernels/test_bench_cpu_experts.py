"""``scripts/bench_cpu_experts.py`` compares both sides and prints a line for each dtype."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_cpu_experts.py"


@pytest.mark.parametrize("options", [[], ["--without-products"]])
def test_a_shape_that_both_take_and_one_that_is_refused(options):
    for dim, cell in ((8, "| 8 |"), (10, "refused")):
        shape = ["32", str(dim), "16", "4", "2", "0"]
        command = [sys.executable, str(SCRIPT), *options, "--rounds", "1", "--shape", *shape]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        header, _, *lines = done.stdout.splitlines()
        assert [line.split(" | ")[0] for line in lines] == ["| float32", "| bfloat16"]
        assert all(line.count("|") == header.count("|") for line in lines)
        assert cell in lines[-1]
