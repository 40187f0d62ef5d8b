"""The small sibling of every model in train_configs/ learns, through the relay on several ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.distributed import run_ranks
from tests.titan.runs import Run, Steps, a_run, train, write_data

ROOT = Path(__file__).resolve().parents[3]
NAMES = sorted(path.stem for path in (ROOT / "train_configs").glob("*_tiny.toml"))
STEPS = 8
SHORT = {
    "training__steps": STEPS,
    "training__seq_len": 64,
    "training__local_batch_size": 4,
    "training__cpu_threads_per_rank": 1,
    "parallelism__data_parallel_shard_degree": 1,
    "parallelism__expert_parallel_degree": 2,
    "lr_scheduler__warmup_steps": 2,
    "validator__enable": False,
    "metrics__enable_tensorboard": False,
    "metrics__log_freq": 1,
}


def train_tiny(folder: str, runs: list[Run]) -> dict[str, Steps]:
    """Train each model in this rank's process group; its steps by name."""
    torch.set_num_threads(1)
    return {
        run.name: train(Path(folder), run, ROOT / "train_configs" / f"{run.name}.toml")
        for run in runs
    }


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    """What two ranks, which share the experts and cut every sequence in two, saw."""
    folder = tmp_path_factory.mktemp("tiny")
    write_data(folder)
    data = {
        "data__files": [f"{folder}/corpus.jsonl"],
        "tokenizer__path": f"{folder}/ranks.tiktoken",
    }
    runs = [a_run(name, **SHORT, **data) for name in NAMES]
    found: dict[str, Steps] = run_ranks(train_tiny, 2, str(folder), runs)[0]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_learns(name: str, steps: dict[str, Steps]) -> None:
    losses = steps[name].losses
    assert len(losses) == STEPS
    # Byte patterns are learnt at once: seen to fall by 1.7 to 2 in 8 steps.
    assert losses[-1] < losses[0] - 0.5


@pytest.fixture(scope="module")
def demo_data() -> None:
    """The corpus and the tokenizer that the files name."""
    subprocess.run([sys.executable, "scripts/demo.py", "--data-only"], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("demo_data")
def test_learns_by_its_own_command(name: str, tmp_path: Path) -> None:
    """The command in the file's first lines, on four ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    arguments = ["--config", f"train_configs/{name}.toml", "--training.steps", "20"]
    outcome = subprocess.run(
        [*torchrun, "train.py", *arguments, "--dump_folder", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    lines = re.findall(r"step: (\d+)/20 .*?loss: ([\d.]+)", outcome.stdout + outcome.stderr)
    losses = {int(step): float(loss) for step, loss in lines}
    assert {1, 10, 20} <= losses.keys()
    # Real text and a vocabulary of 4096: seen to fall by more than 1 in 20 steps.
    assert losses[20] < losses[10] < losses[1] - 0.2
