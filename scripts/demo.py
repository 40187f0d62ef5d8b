"""The demo behind `make demo`: corpus, tokenizer, training on 4 ranks, and what came of it.

Each stage is skipped when its output is there, so the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "outputs" / "demo_data"
RUN = ROOT / "outputs" / "demo"
CORPUS, RANKS, REPORT = DATA / "corpus", DATA / "tokenizer.tiktoken", DATA / "corpus.json"
NUM_RANKS = 4
END_OF_TEXT = "<|endoftext|>"


def main() -> int:
    """Run all stages; returns the exit code of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="train up to this step")
    parser.add_argument("--data-only", action="store_true", help="stop before training")
    arguments = parser.parse_args()
    steps = arguments.steps
    relay = [sys.executable, "-m", "titan_relay"]
    corpus = [*relay, "corpus", "--out", str(CORPUS)]
    tokenizer = [*relay, "tokenizer", "--files", str(CORPUS / "train.jsonl")]
    tokenizer += ["--special-tokens", END_OF_TEXT, "--vocab-size", "4096"]
    tokenizer += ["--out", str(RANKS), "--report", str(REPORT)]
    train = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    train += ["--nproc_per_node", str(NUM_RANKS), "train.py"]
    train += ["--config", "train_configs/demo.toml", "--training.steps", str(steps)]
    stages = [
        ("[1/3] corpus: the standard library's source", corpus, CORPUS),
        ("[2/3] tokenizer: byte-level BPE", tokenizer, REPORT),
        (f"[3/3] training to step {steps} on {NUM_RANKS} ranks", train, None),
    ]
    if arguments.data_only:
        stages.pop()
    for title, command, output in stages:
        if output is not None and output.exists():
            print(f"{title} (there already: {output.relative_to(ROOT)})", flush=True)
            continue
        print(title, flush=True)
        exit_code = subprocess.run(command, cwd=ROOT, env=_environment()).returncode
        if exit_code:
            return exit_code
    if not arguments.data_only:
        _report(steps)
    return 0


def _environment() -> dict[str, str]:
    """This process's, without GPUs where there are too few for all ranks."""
    import torch

    too_few = 0 < torch.cuda.device_count() < NUM_RANKS
    return os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if too_few else {})


def _report(steps: int) -> None:
    """Print the losses beside the entropy that a model of token frequencies alone would reach."""
    entropy = json.loads(REPORT.read_text())["unigram_entropy_nats"]
    train_step, train_loss = _last_point("loss_metrics/global_avg_loss")
    validation_step, validation_loss = _last_point("validation_metrics/loss")
    print(
        f"\nUnigram entropy of the corpus    {entropy:.3f} nats per token\n"
        f"Training loss at step {train_step:<10} {train_loss:.3f} ({train_loss - entropy:+.3f})\n"
        f"Validation loss at step {validation_step:<8} {validation_loss:.3f} "
        f"({validation_loss - entropy:+.3f})\n\n"
        f"Curves:  {sys.executable} -m tensorboard.main --logdir {RUN.relative_to(ROOT) / 'tb'}\n"
        f"Go on:   make demo DEMO_STEPS={steps + 60}\n"
        "Change:  edit train_configs/demo.toml; every key is in docs/config.md"
    )


def _last_point(tag: str) -> tuple[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(RUN / "tb"), size_guidance={"scalars": 0}).Reload()
    point = events.Scalars(tag)[-1]
    return point.step, point.value


if __name__ == "__main__":
    sys.exit(main())
