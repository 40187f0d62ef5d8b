"""Tokens per second within one budget of live tensor bytes, by ways to run the same model.

    python scripts/bench_budget.py --config scripts/budget/qwen3_30b_scaled.toml --world-size 4 \
        --budget-mib 120

Starts its own CPU ranks. The sequence length is the longest at which `alltoall-full-recompute` fits
the budget, unless --seq-len says otherwise. Every variant then spends the budget as it likes: it
takes the largest batch that fits, and the relay also chooses what attention keeps. The choices run
real steps in turns, so that what else the machine does falls on all alike; medians of tokens per
second, of all ranks together. --profile N adds the N operators that take most of a step of each
choice on rank 0. Further arguments are configuration keys.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from budget.candidates import Choice, within_budget
from titan_relay.commands.arguments import above_0, at_least_1, parse_with_keys, script_parser
from titan_relay.commands.variants import BASELINE, VARIANTS, runs_of, variant_names
from titan_relay.config import ConfigError, RunConfig
from titan_relay.local_ranks import largest, on_ranks, say
from titan_relay.titan.plan.longest import search_on_ranks
from titan_relay.titan.plan.measure import measure_steps, small_trainer
from titan_relay.units import MIB, in_mib

EXIT_USER_ERROR = 2


@dataclass(frozen=True)
class Share:
    """One operator, without those that it calls: its part of the step's time, and its calls."""

    operator: str
    share: float
    num_calls: int

    def line(self) -> str:
        return f"  {100 * self.share:5.1f}%  {self.num_calls:>7,}  {self.operator}"


@dataclass(frozen=True)
class Speed:
    """One choice and how fast it was, over all ranks."""

    variant: str
    seq_len: int
    local_batch_size: int
    retention: str
    peak_bytes: int
    tokens_per_second: float
    shares: list[Share]  # of a step's time on rank 0, with --profile


def main(argv: list[str] | None = None) -> int:
    args, keys = parse(argv)
    try:
        if "relay-retain-auto" in args.variants:
            raise ConfigError(
                "--variants relay-retain-auto: the relay's variants try every level of what is "
                "kept; use relay-recompute"
            )
        named = dict.fromkeys([BASELINE, *args.variants] if args.seq_len is None else args.variants)
        runs = runs_of(named, args.config, keys, args.world_size, args.seq_len)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    speeds: list[Speed] = on_ranks(_speeds_of, runs, args, world_size=args.world_size)
    if not speeds:
        why = f"{BASELINE} does" if args.seq_len is None else "the variants do"
        print(
            f"error: --budget-mib {args.budget_mib:g}: {why} not fit at "
            f"{'any' if args.seq_len is None else 'this'} length; give more",
            file=sys.stderr,
        )
        return EXIT_USER_ERROR
    if args.json:
        print(json.dumps([asdict(speed) for speed in speeds], indent=2))
    else:
        print(table(speeds))
    return 0


def _speeds_of(runs: dict[str, RunConfig], args: argparse.Namespace) -> list[Speed]:
    """Find the choices within the budget, and time them; every rank calls alike."""
    budget_bytes = int(args.budget_mib * MIB)
    seq_len = args.seq_len
    if seq_len is None:
        seq_len = search_on_ranks(BASELINE, runs[BASELINE], budget_bytes).max_seq_len

    def peak_of(candidate: RunConfig) -> int:
        (memory,) = measure_steps(candidate, args.world_size, compute_in_float32=False)
        return largest(memory.steady.live_bytes)

    choices: list[Choice] = []
    for name in args.variants if seq_len else ():
        for choice in within_budget(runs[name], name, seq_len, budget_bytes, peak_of):
            say(
                f"{name}: batch {choice.local_batch_size}, keeps {choice.retention}, "
                f"{in_mib(choice.peak_bytes, 1)}"
            )
            choices.append(choice)
    seconds = []
    for turn in range(1, args.turns + 1):
        say(f"turn {turn} of {args.turns}")
        seconds.append([_seconds(choice.run, args.world_size) for choice in choices])
    speeds = []
    for index, choice in enumerate(choices):
        p = choice.run.parallelism
        readers = args.world_size // (p.context_parallel_degree * p.tensor_parallel_degree)
        tokens = seq_len * choice.local_batch_size * readers
        rate = tokens / statistics.median(turn[index] for turn in seconds)
        speeds.append(
            Speed(
                choice.variant, seq_len, choice.local_batch_size, choice.retention,
                choice.peak_bytes, rate, _shares(choice, args.world_size, args.profile),
            )
        )  # fmt: skip
    return speeds


@contextmanager
def _warm_step(run: RunConfig, world_size: int) -> Iterator[Callable[[], None]]:
    """Takes one more step of a trainer that has taken one to warm up."""
    with small_trainer(run, world_size, num_steps=2) as trainer:
        batches = trainer.batch_generator(trainer.dataloader)

        def step() -> None:
            trainer.step += 1
            trainer.train_step(batches)

        step()
        yield step


def _seconds(run: RunConfig, world_size: int) -> float:
    """The time of one step."""
    with _warm_step(run, world_size) as step:
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        return time.perf_counter() - start


def _shares(choice: Choice, world_size: int, num: int) -> list[Share]:
    """The largest shares of a step's time on rank 0."""
    if num == 0:
        return []
    say(f"profiling {choice.variant}, keeps {choice.retention}")
    with _warm_step(choice.run, world_size) as step:
        if dist.get_rank() == 0:  # a profile takes a GiB of memory
            return largest_shares(step, num)
        step()
        return []


def largest_shares(step: Callable[[], object], num: int) -> list[Share]:
    """The `num` operators with the most time of their own in one call of `step`.

    What runs between operators, such as Python and waiting for other ranks, counts to the operator
    around it, or to none.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    averages = [each for each in profiled.key_averages() if each.self_cpu_time_total > 0]
    averages.sort(key=lambda each: -each.self_cpu_time_total)
    total = sum(each.self_cpu_time_total for each in averages)
    return [Share(each.key, each.self_cpu_time_total / total, each.count) for each in averages][
        :num
    ]


def table(speeds: list[Speed]) -> str:
    """Choices in rows, with their ratio to the baseline's best."""
    base = max((s.tokens_per_second for s in speeds if s.variant == BASELINE), default=0.0)
    lines = [
        f"{'variant':<26} {'length':>7} {'batch':>6} {'peak MiB':>9} {'tokens/s':>9} "
        f"{'ratio':>6}  keeps"
    ]
    for s in speeds:
        ratio = f"{s.tokens_per_second / base:.2f}" if base else "-"
        lines.append(
            f"{s.variant:<26} {s.seq_len:>7,} {s.local_batch_size:>6} {s.peak_bytes / MIB:9.1f} "
            f"{s.tokens_per_second:9.0f} {ratio:>6}  {s.retention}"
        )
    for s in speeds:
        if s.shares:
            lines += ["", f"{s.variant}, batch {s.local_batch_size}, keeps {s.retention}:"]
            lines += [share.line() for share in s.shares]
    return "\n".join(lines)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The script's arguments, and those that are configuration keys."""
    parser = script_parser(__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, help="the run's TOML file")
    parser.add_argument("--world-size", type=at_least_1, required=True, help="ranks to start")
    parser.add_argument("--budget-mib", type=above_0, required=True, help="live bytes of a rank")
    parser.add_argument("--seq-len", type=at_least_1, help="instead of the baseline's longest")
    parser.add_argument(
        "--variants", type=variant_names, default=[BASELINE, "relay-recompute"],
        help=f"any of {','.join(VARIANTS)}",
    )  # fmt: skip
    parser.add_argument("--turns", type=at_least_1, default=3, help="timed steps of each choice")
    parser.add_argument(
        "--profile", type=at_least_1, default=0, metavar="N", help="list the N largest operators"
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parse_with_keys(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
