"""The warm-up compiles every kernel that a layer launches, so that no step waits for a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titan_relay.moe import LayerShape, RelayOptions, warm_up

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SHAPE = LayerShape(1, 16, dim=16, expert_dim=16, num_experts=2, top_k=1, dtype=torch.float32)


def test_every_kernel_of_both_rings_is_warmed_up():
    pytest.importorskip("triton", reason="triton is for Linux")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "scripts")]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("record_launches.py"))],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kernels") == 4  # two rings, two orders of sums


def test_plain_pytorch_has_nothing_to_compile():
    assert warm_up(SHAPE, RelayOptions(), CPU) == 0.0


def test_time_is_reported():
    assert warm_up(SHAPE, RelayOptions(kernels="triton"), CPU) > 0.0
