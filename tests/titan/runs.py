"""Whole training runs for the distributed tests: tiny, from TOML-like settings, through the real
data, trainer and checkpoints."""

from __future__ import annotations

import base64
import gc
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from titan_relay.config import Loaded, RunConfig, load_config
from titan_relay.validate import validate

VOCAB_SIZE = 257
SEQ_LEN = 64
GLOBAL_BATCH = 8
SEED = 5

MODEL = {
    "family": "qwen3_moe",
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "max_seq_len": SEQ_LEN,
    "rope_theta": 1e4,
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "init_std": 0.1,
}
MOE = {
    "num_experts": 8,
    "top_k": 2,
    "expert_dim": 24,
    "score_func": "softmax",
    "route_norm": True,
    "aux_loss_coeff": 0.01,
    "z_loss_coeff": 0.001,
}


@dataclass(frozen=True)
class Run:
    """One run: a name for messages, and command-line settings on top of the common ones."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()


def a_run(name: str, **settings: Any) -> Run:
    """Keyword arguments are keys with "__" for the dot: `relay__dispatcher="alltoall"`."""
    return Run(name, tuple((key.replace("__", "."), value) for key, value in settings.items()))


def layout(dp: int = 1, cp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1, rep: int = 1) -> dict:
    """Settings of a parallel layout, with the local batch that needs no accumulation."""
    return {
        "parallelism__data_parallel_replicate_degree": rep,
        "parallelism__data_parallel_shard_degree": dp,
        "parallelism__context_parallel_degree": cp,
        "parallelism__tensor_parallel_degree": tp,
        "parallelism__pipeline_parallel_degree": pp,
        "parallelism__expert_parallel_degree": ep,
        "training__local_batch_size": GLOBAL_BATCH // (dp * rep),
    }


def write_data(folder: Path, num_documents: int = 60) -> None:
    """A corpus of patterned text, a few held-out documents, and a byte tokenizer."""
    ranks = [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256)]
    (folder / "ranks.tiktoken").write_text("\n".join(ranks) + "\n")
    documents = [
        json.dumps({"text": " ".join(f"{n * k % 97} mod 97" for k in range(1, 5 + n % 13))}) + "\n"
        for n in range(num_documents + 11)
    ]
    (folder / "corpus.jsonl").write_text("".join(documents[:num_documents]))
    (folder / "validation.jsonl").write_text("".join(documents[num_documents:]))


def config_file(folder: Path) -> Path:
    """The settings that all runs share, as the TOML file that a user would write."""
    lines = [f"[model]\n{_toml(MODEL)}", f"[model.moe]\n{_toml(MOE)}"]
    lines.append(f'[data]\nfiles = ["{folder}/corpus.jsonl"]')
    lines.append(
        f'[tokenizer]\npath = "{folder}/ranks.tiktoken"\neos_token = "<eot>"\n'
        'special_tokens = { "<eot>" = 256 }'
    )
    lines.append(
        f"[training]\nseq_len = {SEQ_LEN}\nglobal_batch_size = {GLOBAL_BATCH}\nsteps = 6\n"
        "local_batch_size = 4\ncpu_threads_per_rank = 1"
    )
    lines.append(f'[validator.data]\nfiles = ["{folder}/validation.jsonl"]')
    lines.append("[optimizer]\nlr = 3e-3\n[lr_scheduler]\nwarmup_steps = 2\ntotal_steps = 40")
    lines.append(f"[metrics]\nlog_freq = 1\n[debug]\nseed = {SEED}")
    path = folder / "run.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(table: Mapping[str, Any]) -> str:
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())


@dataclass(frozen=True)
class Steps:
    """What a rank saw of each step."""

    losses: list[float]
    grad_norms: list[float]
    validation_losses: list[float]


def train_all(folder: str, runs: list[Run]) -> dict[str, Steps]:
    """Train each run in this rank's process group; its steps by run name."""
    torch.set_num_threads(1)
    return {run.name: train(Path(folder), run) for run in runs}


def load_run(folder: Path, run: Run) -> RunConfig:
    """The configuration of a run."""
    return _load(folder, run).config


def _load(folder: Path, run: Run, file: Path | None = None) -> Loaded:
    arguments = ["--config", str(file or folder / "run.toml")]
    arguments += ["--dump_folder", str(folder / run.name)]
    for key, value in run.settings:
        arguments += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return load_config(arguments)


def trainer_of(folder: Path, run: Run, file: Path | None = None) -> Any:
    """A built trainer that records `losses`, `grad_norms` and `validation_losses`.

    `file`: the TOML file; None: the one in the folder.
    """
    import torch.distributed as dist

    from titan_relay.titan.train.build import build_trainer_config

    _end_at_once()
    loaded = _load(folder, run, file)
    validate(loaded.config, dist.get_world_size(), loaded.origins)
    trainer = build_trainer_config(loaded.config, dist.get_world_size()).build()
    trainer.losses, trainer.grad_norms, trainer.validation_losses = [], [], []
    log = trainer.metrics_processor.log
    log_validation = trainer.metrics_processor.log_validation

    def record(step: int, loss: float, max_loss: float, norm: float, **more: Any) -> None:
        trainer.losses.append(loss)
        trainer.grad_norms.append(norm)
        log(step, loss, max_loss, norm, **more)

    def record_validation(loss: float, step: int, **more: Any) -> None:
        trainer.validation_losses.append(loss)
        log_validation(loss, step, **more)

    trainer.metrics_processor.log = record
    trainer.metrics_processor.log_validation = record_validation
    return trainer


def _end_at_once() -> None:
    """Spare every run the two seconds that torchtitan's rank 0 waits for ranks that end later: here
    all end together, in `run_ranks`."""
    import torchtitan.trainer

    torchtitan.trainer.time = SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda seconds: None
    )


def train(folder: Path, run: Run, file: Path | None = None) -> Steps:
    """Train one run; `file` as for `trainer_of`."""
    trainer = trainer_of(folder, run, file)
    trainer.train()
    steps = Steps(trainer.losses, trainer.grad_norms, trainer.validation_losses)
    trainer.close()
    del trainer
    gc.collect()
    return steps
