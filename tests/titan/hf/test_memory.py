"""What a conversion holds at once: ours a few tensors, torchtitan's own the whole model and more.

If the test of torchtitan's fails, it has learnt to convert in pieces: use it, and delete
`titan_relay.titan.hf.dcp` with what is built on it.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from tests.titan.hf.folders import write_noise
from titan_relay.config import load_config
from titan_relay.config.schema import ModelConfig
from titan_relay.titan.hf.from_hf import from_hf
from titan_relay.titan.hf.names import NameMap
from titan_relay.titan.hf.to_hf import to_hf
from titan_relay.titan.model.families import FAMILIES, build_model_config

MIB = 2**20
CONFIG = Path(__file__).parents[3] / "train_configs" / "qwen3_30b_a3b.toml"
SIZES = {
    "dim": 256,
    "num_layers": 6,
    "vocab_size": 8192,
    "num_heads": 8,
    "head_dim": 64,
    "moe.num_experts": 64,
    "moe.expert_dim": 512,
}


def model() -> ModelConfig:
    """301 MiB in bfloat16, its largest tensors of 16 MiB."""
    settings = [f"--model.{key}={value}" for key, value in SIZES.items()]
    return load_config(["--config", str(CONFIG), *settings]).config.model


def torchtitan_from_hf(source: Path, target: Path) -> None:
    """What torchtitan's scripts/checkpoint_conversion/convert_from_hf.py does."""
    state, adapter = state_and_adapter(source)
    theirs = adapter.to_hf(state)
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(source)))
    dcp.save(adapter.from_hf(theirs), checkpoint_id=str(target))


def torchtitan_to_hf(source: Path, target: Path) -> None:
    """What torchtitan's scripts/checkpoint_conversion/convert_to_hf.py does."""
    state, adapter = state_and_adapter(source / "hf")
    dcp.load(state, checkpoint_id=str(source))
    writer = HuggingFaceStorageWriter(
        str(target),
        adapter.fqn_to_index_mapping,
        save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(adapter.to_hf(state), storage_writer=writer)


def state_and_adapter(assets: Path) -> tuple[dict[str, Any], Any]:
    config = build_model_config(model(), seed=0, cpu=True)
    built = config.build().to(torch.bfloat16)
    return built.state_dict(), FAMILIES[model().family].adapter(config, str(assets))


def our_from_hf(source: Path, target: Path) -> None:
    from_hf(source, model(), target)


def our_to_hf(source: Path, target: Path) -> None:
    to_hf(source, model(), target)


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def growth_bytes(convert: Callable[[Path, Path], None], source: Path, target: Path) -> int:
    """By how much a conversion raises the memory of this process at its peak."""
    samples, done = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            samples.append(anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        convert(source, target)
    finally:
        done.set()
        thread.join()
    return max(samples) - samples[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights as a Hugging Face folder and as a checkpoint."""
    folder = tmp_path_factory.mktemp("memory")
    write_noise(folder / "hf", model(), shard_bytes=64 * MIB)
    our_from_hf(folder / "hf", folder / "checkpoint")
    return {"from": folder / "hf", "to": folder / "checkpoint"}


# Conversion, where it reads from, and the MiB that it takes: at least, at most.
CASES = {
    "ours from": (our_from_hf, "from", 32, 290),  # a part of 256 MiB and two tensors
    "ours to": (our_to_hf, "to", 16, 128),
    "torchtitan's from": (torchtitan_from_hf, "from", 500, 900),
    "torchtitan's to": (torchtitan_to_hf, "to", 350, 900),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_memory_of_a_conversion(
    name: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert, start, at_least, at_most = CASES[name]
    shapes = [torch.Size(each.shape) for each in NameMap(model()).entries]
    num_bytes, largest = (2 * f(each.numel() for each in shapes) for f in (sum, max))
    with multiprocessing.get_context("spawn").Pool(1) as process:
        growth = process.apply(growth_bytes, (convert, folders[start], tmp_path / "out")) / MIB
    with capsys.disabled():
        print(
            f"\n{name}: {growth:.0f} MiB for {num_bytes / MIB:.0f} MiB of weights, the largest "
            f"{largest / MIB:.0f} MiB"
        )
    assert at_least < growth < at_most
