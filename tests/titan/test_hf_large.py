"""A checkpoint several times larger than the memory that the conversion is allowed, with a kill on
the way: `make prove-conversion` shows the peaks.

The folder has the layers of Qwen3-30B-A3B at their real size, fewer of them.
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
import torch

from titan_relay.config import load_config
from titan_relay.titan.hf.config_json import config_of
from titan_relay.titan.hf.export import shard_files, write_assets, write_index
from titan_relay.titan.hf.names import NameMap
from titan_relay.titan.hf.safetensors_file import FileLayout

GIB = 2**30
LIMIT_BYTES = 2 * GIB
ROOT = Path(__file__).parents[2]
MODEL = """
[model]
family = "qwen3_moe"
dim = 2048
num_layers = 6
num_heads = 32
num_kv_heads = 4
head_dim = 128
vocab_size = 151936
max_seq_len = 40960
rope_theta = 1e6
norm_eps = 1e-6
tie_word_embeddings = false
[model.moe]
num_experts = 128
top_k = 8
expert_dim = 768
score_func = "softmax"
route_norm = true
aux_loss_coeff = 0.001
"""


def _write_folder(folder: Path, config: Path) -> int:
    """Write the weights tensor by tensor; returns their bytes."""
    model = load_config(["--config", str(config)]).config.model
    shapes = NameMap(model).hf_shapes
    sizes = {name: torch.Size(shape).numel() * 2 for name, shape in shapes.items()}
    file_of = shard_files(sizes, GIB)
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**15), 2**15, (2**20,), generator=generator, dtype=torch.int16)
    for file in sorted(set(file_of.values())):
        layout = FileLayout((n, torch.bfloat16, shapes[n]) for n in shapes if file_of[n] == file)
        layout.create(folder / file)
        for index, name in enumerate(layout.places):
            count = torch.Size(shapes[name]).numel()
            # Each tensor its own bytes: the noise, shifted by a number of its own.
            values = (noise + _number_of(name, index)).repeat(-(-count // len(noise)))[:count]
            layout.write(folder / file, name, values.view(torch.bfloat16).view(shapes[name]))
    write_index(folder, file_of, sum(sizes.values()))
    write_assets(folder, config_of(model, "bfloat16"), [])
    return sum(sizes.values())


def _number_of(name: str, index: int) -> int:
    return (sum(name.encode()) * 31 + index) % 2**15


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "scripts/convert_hf.py", *arguments],
        cwd=ROOT,
        preexec_fn=_limit_memory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _run(*arguments: str) -> str:
    process = _start(*arguments)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return out


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_checkpoint_larger_than_memory_converts_both_ways_and_survives_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, source = tmp_path / "model.toml", tmp_path / "hf"
    config.write_text(MODEL)
    if shutil.disk_usage(tmp_path).free < 40 * 10**9:
        pytest.skip("needs 40 GB of disk")
    num_bytes = _write_folder(source, config)
    assert num_bytes > 4 * LIMIT_BYTES
    from_hf = ["from-hf", "--hf-dir", str(source), "--config", str(config)]
    from_hf += ["--out", str(tmp_path / "checkpoint")]

    killed = _start(*from_hf)
    assert killed.stdout is not None
    last = ""
    for line in killed.stdout:
        last = line
        if " of " in line and "tensors" in line:
            time.sleep(0.5)
            killed.send_signal(signal.SIGKILL)
            break
    assert killed.wait() == -signal.SIGKILL
    first = _run(*from_hf)
    assert "going on behind what an earlier call finished" in first
    second = _run(
        *["to-hf", "--checkpoint", str(tmp_path / "checkpoint"), "--config", str(config)],
        *["--out", str(tmp_path / "out")],
    )
    with capsys.disabled():
        print(
            f"\n{num_bytes / GIB:.2f} GiB of weights, at most {LIMIT_BYTES / GIB:.2f} GiB of memory"
        )
        print(f"killed after: {last.strip()}")
        print(first.strip())
        print(second.strip())
    names = sorted(each.name for each in source.iterdir())
    assert names == sorted(each.name for each in (tmp_path / "out").iterdir())
    for name in names:
        assert filecmp.cmp(source / name, tmp_path / "out" / name, shallow=False), name
    for each in ("hf", "checkpoint", "out"):
        shutil.rmtree(tmp_path / each)  # pytest keeps the folders of its last runs
