"""Predicted against measured: plans of small runs, and the same runs on real CPU ranks.

    python scripts/check_plan.py train_configs/*_tiny.toml --world-size 4
    python scripts/check_plan.py train_configs/mixtral_8x7b_tiny.toml --world-size 2

For every file, dispatcher, level of what is kept, and degrees of context and expert parallelism
that the ranks allow: the peak of live tensor bytes in a step after the first, as planned on fake
tensors and as counted on the ranks that this script starts (the largest of them). The router is
made to route evenly, since a plan of the all-to-all assumes that. Exit code 1: one is more than 3%
off.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from report_tables import markdown_table
from titan_relay.commands.arguments import at_least_1, file_to_write, script_parser, write_json
from titan_relay.config import ConfigError, RunConfig, load_config, with_settings
from titan_relay.local_ranks import largest, on_ranks, say
from titan_relay.measure.devices import device_named
from titan_relay.titan.plan.dry_run import dry_run
from titan_relay.titan.plan.measure import measure_steady_bytes
from titan_relay.units import MIB
from titan_relay.validate import validate

TOLERANCE = 0.03
EXIT_OFF, EXIT_USER_ERROR = 1, 2
_LEVELS = {
    "relay": [("attention_retention.mode", level) for level in ("recompute", "output", "full")],
    "alltoall": [("activation_checkpoint.mode", mode) for mode in ("none", "selective", "full")],
}


@dataclass(frozen=True)
class Case:
    """One run to compare."""

    config: str
    dispatcher: str
    level: str
    cp: int
    ep: int


@dataclass(frozen=True)
class Compared(Case):
    """A case's peaks."""

    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        cases = dict(all_cases(args.configs, args.world_size))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    if not cases:
        print(
            f"error: --world-size {args.world_size}: no combination of dispatcher, level and "
            "degrees is valid; give another number of ranks",
            file=sys.stderr,
        )
        return EXIT_USER_ERROR
    say(f"{len(cases)} runs on {args.world_size} ranks")
    runs = list(cases.values())
    measured = on_ranks(_measure, runs, args.world_size, world_size=args.world_size)
    results = []
    for number, (case, measured_bytes) in enumerate(zip(cases, measured, strict=True), 1):
        say(f"planning {number} of {len(cases)}")
        predicted = dry_run(cases[case], args.world_size, device_named("cpu")).steady.live_bytes
        results.append(
            Compared(**asdict(case), predicted_bytes=predicted, measured_bytes=measured_bytes)
        )
    print(table(results))
    if args.json:
        write_json(args.json, [asdict(each) | {"error": each.error} for each in results])
    return EXIT_OFF if any(abs(result.error) > TOLERANCE for result in results) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("configs", nargs="+", help="TOML files of small runs")
    parser.add_argument("--world-size", type=at_least_1, default=4, help="ranks (default 4)")
    parser.add_argument(
        "--json", type=file_to_write, metavar="FILE", help="also write the table as JSON"
    )
    return parser.parse_args(argv)


def all_cases(configs: list[str], world_size: int) -> Iterator[tuple[Case, RunConfig]]:
    """Every combination that is valid on so many ranks."""
    degrees = [2**power for power in range(world_size.bit_length()) if 2**power <= world_size]
    for config in configs:
        base = load_config(["--config", config]).config
        for dispatcher, cp, ep in itertools.product(_LEVELS, (1, 2), degrees):
            for key, level in _LEVELS[dispatcher]:
                settings = {
                    "attention_retention.mode": "recompute",
                    "activation_checkpoint.mode": "none",
                    "relay.dispatcher": dispatcher,
                    "parallelism.data_parallel_replicate_degree": 1,
                    "parallelism.data_parallel_shard_degree": -1,
                    "parallelism.context_parallel_degree": cp,
                    "parallelism.expert_parallel_degree": ep,
                    "training.global_batch_size": -1,
                    "debug.moe_force_load_balance": True,
                    "loss.name": "chunked_cross_entropy",  # or it would hide the blocks
                    "loss.num_chunks": 8,
                    key: level,
                }
                run = with_settings(base, settings)
                try:
                    validate(run, world_size, config, files=False)
                except ConfigError:
                    continue
                yield Case(Path(config).stem, dispatcher, level, cp, ep), run


def _measure(runs: list[RunConfig], world_size: int) -> list[int]:
    """The largest rank's peak of a step after the first, by run; every rank calls alike."""
    peaks = []
    for number, run in enumerate(runs, 1):
        peaks.append(largest(measure_steady_bytes(run, world_size)))
        say(f"measured {number} of {len(runs)}")
    return peaks


def table(results: list[Compared]) -> str:
    """Markdown."""
    header = "config", "dispatcher", "keeps", "cp", "ep", "predicted MiB", "measured MiB", "off by"
    rows = [
        (
            *(r.config, r.dispatcher, r.level, r.cp, r.ep),
            *(f"{r.predicted_bytes / MIB:.2f}", f"{r.measured_bytes / MIB:.2f}", f"{r.error:+.2%}"),
        )
        for r in results
    ]
    worst = max(results, key=lambda result: abs(result.error))
    summary = f"{len(results)} runs, at most {abs(worst.error):.2%} off."
    return f"{markdown_table(header, rows)}\n\n{summary}"


if __name__ == "__main__":
    sys.exit(main())
