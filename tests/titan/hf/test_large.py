"""A checkpoint several times larger than the memory that the conversion is allowed, with a kill on
the way: `make prove-conversion` shows the peaks.

The folders have the layers of released models at their real size, fewer of them.
"""

from __future__ import annotations

import filecmp
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.titan.hf.folders import write_noise
from titan_relay.config import load_config

GIB = 2**30
ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "train_configs"
# Configuration, layers, and the memory allowed: what the largest tensor needs twice, and libraries.
CASES = {
    "qwen3_30b_a3b": (6, 2.0),
    "qwen2_57b_a14b": (3, 3.25),
}


def _start(limit_bytes: int, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "titan_relay", "convert", *arguments],
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _run(limit_bytes: int, *arguments: str) -> str:
    process = _start(limit_bytes, *arguments)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return out


@pytest.mark.disk
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_larger_than_memory_converts_both_ways_and_survives_a_kill(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_layers, limit_gib = CASES[name]
    limit_bytes = int(limit_gib * GIB)
    config = ["--config", str(CONFIGS / f"{name}.toml"), "--model.num_layers", str(num_layers)]
    source, checkpoint, out = (tmp_path / each for each in ("hf", "checkpoint", "out"))
    free_gb = shutil.disk_usage(tmp_path).free / 10**9
    if free_gb < 40:
        pytest.skip(f"writes 40 GB of weights to {tmp_path}, where {free_gb:.0f} GB are free")
    try:
        num_bytes = write_noise(source, load_config(config).config.model, shard_bytes=GIB)
        assert num_bytes > 3 * limit_bytes
        from_hf = ["from-hf", "--hf-dir", str(source), *config, "--out", str(checkpoint)]
        to_hf = ["to-hf", "--checkpoint", str(checkpoint), *config, "--out", str(out)]
        killed = _kill_after_the_first_part(_start(limit_bytes, *from_hf))
        first = _run(limit_bytes, *from_hf)
        assert "going on behind what an earlier call finished" in first
        second = _run(limit_bytes, *to_hf)
        with capsys.disabled():
            print(
                f"\n{name}, {num_layers} layers: {num_bytes / GIB:.2f} GiB of weights, at most "
                f"{limit_gib} GiB of memory; killed after: {killed}"
            )
            for text in (first, second):
                print("\n".join(text.strip().splitlines()[-2:]))
        files = sorted(each.name for each in source.iterdir())
        assert files == sorted(each.name for each in out.iterdir())
        for file in files:
            assert filecmp.cmp(source / file, out / file, shallow=False), file
    finally:  # pytest keeps the folders of its last runs
        for folder in (source, checkpoint, out):
            shutil.rmtree(folder, ignore_errors=True)


def _kill_after_the_first_part(process: subprocess.Popen[str]) -> str:
    """Returns the line of progress that it had come to."""
    assert process.stdout is not None
    for line in process.stdout:
        if " of " in line and "tensors" in line:
            time.sleep(0.5)
            process.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL
    return line.strip()
