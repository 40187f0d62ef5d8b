"""The search over real steps on CPU ranks, under a budget of live tensor bytes."""

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from longest.ranks import largest, start_rank
from longest.result import Result, made_of, result_of
from titan_relay.config import RunConfig, degrees_of
from titan_relay.titan.plan.longest import Tried, longest_of, with_length
from titan_relay.titan.plan.measure import measure_steps
from titan_relay.titan.plan.variants import variant_of
from titan_relay.units import in_mib


def search_measured(
    run: RunConfig,
    world_size: int,
    variants: Sequence[str],
    budget_bytes: int,
    say: Callable[[str], None],
) -> list[Result]:
    """The longest sequence of each variant whose largest rank stays within the budget."""
    with tempfile.TemporaryDirectory(prefix="longest") as folder:
        answers = mp.get_context("spawn").SimpleQueue()
        mp.spawn(
            _rank_main,
            args=(world_size, folder, run, tuple(variants), budget_bytes, answers, say),
            nprocs=world_size,
        )
        results: list[Result] = answers.get()
        return results


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    run: RunConfig,
    variants: Sequence[str],
    budget_bytes: int,
    answers: Any,
    say: Callable[[str], None],
) -> None:
    start_rank(rank, world_size, folder)
    if rank != 0:
        say = _mute
    results = [
        search_variant(variant_of(run, name), name, world_size, budget_bytes, say)
        for name in variants
    ]
    if rank == 0:
        answers.put(results)
    dist.barrier()
    dist.destroy_process_group()


def search_variant(
    run: RunConfig, name: str, world_size: int, budget_bytes: int, say: Callable[[str], None]
) -> Result:
    """The longest sequence of one variant; every rank of the process group calls alike."""
    tries: list[Tried] = []

    def peak(seq_len: int) -> Tried:
        (memory,) = measure_steps(with_length(run, seq_len), world_size, compute_in_float32=False)
        peak_bytes = largest(memory.steady.live_bytes)
        tried = Tried(
            seq_len,
            peak_bytes,
            made_of(memory.steady.phase, memory.steady.by_category, memory.host_bytes),
        )
        tries.append(tried)
        say(f"  {name}: {seq_len:,} tokens take {in_mib(peak_bytes, 1)}")
        return tried

    degrees = degrees_of(run, world_size)
    found = longest_of(peak, run, degrees, budget_bytes, run.training.seq_len)
    return result_of(name, found, tries)


def _mute(text: str) -> None:
    """Rank 0 speaks for all."""
