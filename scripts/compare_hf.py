"""Compares one step of this trainer with the same step in transformers, for a Hugging Face folder.

    python scripts/compare_hf.py --hf-dir DIR --config FILE
    python scripts/compare_hf.py --hf-dir DIR --config FILE --ep 2 --circulate tokens
    python scripts/compare_hf.py --hf-dir DIR --config FILE --ep 2 --dispatcher alltoall
    python scripts/compare_hf.py --hf-dir DIR --config FILE --cp 2

Logits, loss and the gradient of every parameter, in float32, on random tokens. Prints the largest
differences, each relative to the largest value of its tensor. Exit code 0: all within --tolerance;
1: not; 2: the input is wrong, in one line. The script starts its own ranks. transformers runs on
CPU and needs 8 bytes a parameter there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from child_process import end_with_parent

from titan_relay.config import ConfigError, RunConfig, load_config
from titan_relay.validate import validate, validate_model

if TYPE_CHECKING:
    from titan_relay.titan.hf_compare import Comparison, Layout

_SHOWN = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the process's exit code."""
    arguments, keys = _parser().parse_known_args(argv)
    from titan_relay.titan.hf.errors import HfError  # imports torch

    try:
        loaded = load_config(["--config", arguments.config, *keys])
        validate_model(loaded.config, loaded.sources)
        comparison = _compare(arguments, loaded.config)
    except (ConfigError, HfError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if comparison is None:
        return 2
    return _report(comparison, arguments.tolerance)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hf-dir", type=Path, required=True, help="the Hugging Face folder")
    parser.add_argument("--config", required=True, help="the run's TOML file")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--dispatcher", choices=("relay", "alltoall"), default="relay")
    parser.add_argument("--circulate", choices=("auto", "experts", "tokens"), default="auto")
    parser.add_argument("--rows", type=int, default=2, help="sequences (default 2)")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens of each (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative (default 1e-5)")
    return parser


def _compare(arguments: argparse.Namespace, config: RunConfig) -> Comparison | None:
    import torch

    from titan_relay.titan.hf.from_hf import open_checked
    from titan_relay.titan.hf_compare import Layout, comparison_run, reference_step

    for name in ("ep", "cp", "rows", "seq_len"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"command line: --{name.replace('_', '-')}: give at least 1")
    layout = Layout(arguments.ep, arguments.cp, arguments.dispatcher, arguments.circulate)
    num_ranks = layout.num_ranks
    if num_ranks % layout.cp or num_ranks % layout.ep:
        raise ConfigError("command line: --cp: must divide --ep, or be a multiple of it")
    num_rows = -(-arguments.rows * layout.cp // num_ranks) * num_ranks // layout.cp
    generator = torch.Generator().manual_seed(arguments.seed)
    shape = (num_rows, arguments.seq_len + 1)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    with tempfile.TemporaryDirectory(prefix="compare_hf") as temporary:
        folder = Path(temporary)
        run = comparison_run(config, layout, arguments.hf_dir, folder, shape)
        validate(run, num_ranks, "command line")
        with _step("1 of 3: names and shapes"):
            open_checked(arguments.hf_dir, config.model)
        with _step("2 of 3: transformers"):
            reference_step(arguments.hf_dir, tokens, folder)
        with _step(f"3 of 3: this trainer on {num_ranks} rank(s)"):
            return _start_ranks(run, layout, tokens, folder)


class _step:
    """Says what is going on, and how long it took."""

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        print(f"{self._label} ...", flush=True)
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        print(f"{self._label}: {time.monotonic() - self._start:.0f} s", flush=True)


def _start_ranks(run: RunConfig, layout: Layout, tokens: Any, folder: Path) -> Comparison | None:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(rank, layout.num_ranks, run, tokens, folder, results))
        for rank in range(layout.num_ranks)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        time.sleep(0.1)
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed:  # the others wait for it
            for process in processes:
                process.kill()
            print(f"error: rank {failed[0]} failed, see above", file=sys.stderr)
            return None
    comparison: Comparison = results.get()
    return comparison


def _rank(
    rank: int, num_ranks: int, run: RunConfig, tokens: Any, folder: Path, results: Any
) -> None:
    import logging

    import torch
    import torch.distributed as dist

    from titan_relay.titan.hf_compare import compare_on_rank

    end_with_parent()
    logging.disable(logging.WARNING)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
    )
    comparison = compare_on_rank(run, tokens, folder)
    if rank == 0:
        results.put(comparison)
    dist.barrier()
    dist.destroy_process_group()


def _report(comparison: Comparison, tolerance: float) -> int:
    print(f"{'':60}{'largest':>12}{'of':>12}{'relative':>12}")
    gradients = comparison.gradients
    rows = [("logits", comparison.logits), ("loss", comparison.loss)]
    rows += [(f"gradient of {each.name}", each) for each in gradients[:_SHOWN]]
    for label, each in rows:
        print(f"{label:60}{each.largest:12.3e}{each.scale:12.3e}{each.relative:12.3e}")
    if len(gradients) > _SHOWN:
        print(f"... and {len(gradients) - _SHOWN} gradients that differ less")
    worst = comparison.worst
    same = worst.relative <= tolerance
    verdict = "the same function" if same else "NOT the same function"
    sign = "<=" if same else ">"
    print(f"{verdict}: {worst.name} differs by {worst.relative:.1e} {sign} {tolerance:.0e}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
