"""The longest sequence that fits a device, for several ways to run the same model.

    titan-relay longest --config FILE.toml --world-size 16 --device h100-80g
    titan-relay longest --config FILE.toml --world-size 4 --measure --budget-mib 400

Searches over the planner: every try is the trainer's own step on fake tensors (a deep model's from
two shallow ones). With --measure every try is a real step on CPU ranks that this starts, and the
limit is a budget of live tensor bytes. Further arguments are configuration keys, as for train. Exit
code 1: no variant fits at any length.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_relay.commands import arguments as arg
from titan_relay.commands.variants import BASELINE, VARIANTS, runs_of, variant_names
from titan_relay.config import ConfigError, RunConfig
from titan_relay.units import MIB, in_words

if TYPE_CHECKING:
    from titan_relay.titan.plan.longest import LongestSequence

EXIT_NOTHING_FITS = 1
_BFLOAT16 = 2  # bytes


def main(arguments: Sequence[str]) -> int:
    args, keys = arg.parse_with_keys(parser(), arguments)
    _check(args)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake CPU tensors stand for a device's
    runs = runs_of(args.variants, args.config, keys, args.world_size)
    device = None if args.measure else arg.device_of(args.device)
    if device is not None and device.is_cpu:
        raise ConfigError("--device cpu: a CPU has no limit; give a number of GiB")
    from titan_relay.titan.plan.longest import search_plans, search_steps

    if device is None:
        results = search_steps(runs, args.world_size, int(args.budget_mib * MIB))
    else:
        results = search_plans(runs, args.world_size, device)
    if args.json:
        names = ("variant", "max_seq_len", "peak_bytes", "limited_by")
        rows = [{name: vars(result)[name] for name in names} for result in results]
        print(json.dumps(rows, indent=2))
    else:
        print(_table(results))
        if args.for_layers:
            print(_deeper(results, next(iter(runs.values())), args.for_layers))
    return 0 if any(result.max_seq_len for result in results) else EXIT_NOTHING_FITS


def parser() -> arg.CommandParser:
    """The command's options."""
    parser = arg.command_parser("longest", __doc__)
    arg.add_run_options(parser, device_needed=False)
    parser.add_argument(
        "--variants", type=variant_names, default=list(VARIANTS),
        help=f"any of {','.join(VARIANTS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="real steps on CPU ranks")
    parser.add_argument(
        "--budget-mib", type=arg.above_0, help="live bytes of a rank, with --measure"
    )
    parser.add_argument(
        "--for-layers", type=arg.at_least_1, metavar="N",
        help="also say what the growth per token would be at N layers that keep their input only",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for arguments that are missing or would do nothing."""
    if args.for_layers is not None and args.json:
        raise ConfigError("--for-layers adds lines to the table; leave out --json")
    if args.measure and args.device is not None:
        raise ConfigError(f"--device {args.device}: --measure runs on this machine's CPU")
    if args.measure and args.budget_mib is None:
        raise ConfigError("--measure needs --budget-mib, the live bytes of a rank")
    if not args.measure and args.budget_mib is not None:
        raise ConfigError("--budget-mib is the budget of --measure; give --device a number of GiB")
    if not args.measure and args.device is None:
        raise ConfigError("--device is missing; name one, or measure with --measure")


def _table(results: Sequence[LongestSequence]) -> str:
    """Variants in rows, with their ratio to the first."""
    head = f"{'variant':<26} {'longest':>10} {'ratio':>6} {'peak':>12}  limited by"
    base = next((r.max_seq_len for r in results if r.variant == BASELINE), 0)
    lines = [head]
    for result in results:
        ratio = f"{result.max_seq_len / base:.2f}" if base else "-"
        lines.append(
            f"{result.variant:<26} {result.max_seq_len:>10,} {ratio:>6} "
            f"{in_words(result.peak_bytes):>12}  {result.limited_by}"
        )
    return "\n".join(lines)


def _deeper(results: Sequence[LongestSequence], run: RunConfig, num_layers: int) -> str:
    """Ratios of growth per token at another depth: a block more keeps one copy of its input."""
    degrees = run.parallelism
    share = degrees.context_parallel_degree * degrees.tensor_parallel_degree
    added = (num_layers - run.model.num_layers) * run.model.dim * _BFLOAT16 / share
    slopes = {each.variant: each.bytes_per_token + added for each in results}
    base = slopes.get(BASELINE)
    lines = [f"growth per token at {num_layers} layers, in copies of a token of the model's width:"]
    for name, slope in slopes.items():
        ratio = f", 1/{base / slope:.2f} of {BASELINE}" if base and name != BASELINE else ""
        lines.append(f"  {name}: {slope * share / (run.model.dim * _BFLOAT16):.1f}{ratio}")
    return "\n".join(lines)
