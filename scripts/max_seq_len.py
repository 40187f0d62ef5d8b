"""The longest sequence that fits a device, for several ways to run the same model.

    python scripts/max_seq_len.py --config FILE --world-size 16 --device h100-80g
    python scripts/max_seq_len.py --config FILE --world-size 4 --measure --budget-mib 400

Searches over the planner: every try is the trainer's own step on fake tensors (a deep model's from
two shallow ones). With --measure every try is a real step on CPU ranks that this script starts, and
the limit is a budget of live tensor bytes. Further arguments are configuration keys. Exit code 1:
no variant fits at any length.
"""

import argparse
import json
import os
import sys

# Fake CPU tensors stand for the device's, whatever this machine has.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from longest.arguments import above_0, at_least_1, parse_with_keys, variants
from longest.measured import search_measured
from longest.planned import search_planned
from longest.result import Result
from longest.runs import checked_run

from titan_relay.config import RunConfig
from titan_relay.measure.devices import device_named
from titan_relay.titan.plan.variants import BASELINE, VARIANTS
from titan_relay.units import MIB, in_words

EXIT_NOTHING_FITS, EXIT_USER_ERROR = 1, 2
_BFLOAT16 = 2  # bytes


def main(argv: list[str] | None = None) -> int:
    args, keys = parse(argv)
    try:
        run = checked_run(args.config, keys, args.variants, args.world_size)
        check(args)
        if args.measure:
            results = search_measured(
                run, args.world_size, args.variants, int(args.budget_mib * MIB), say
            )
        else:
            device = device_named(args.device)
            if device.is_cpu:
                raise ValueError("--device cpu: a CPU has no limit; give a number of GiB")
            results = search_planned(run, args.world_size, args.variants, device, say)
    except ValueError as error:  # ConfigError among them
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    if args.json:
        print(json.dumps([result.json() for result in results], indent=2))
    else:
        print(table(results))
        if args.for_layers:
            print(deeper(results, run, args.for_layers))
    return 0 if any(result.max_seq_len for result in results) else EXIT_NOTHING_FITS


def check(args: argparse.Namespace) -> None:
    """Raise `ValueError` for arguments that are missing or would do nothing."""
    if args.for_layers is not None and args.json:
        raise ValueError("--for-layers adds lines to the table; leave out --json")
    if args.measure and args.device is not None:
        raise ValueError(f"--device {args.device}: --measure runs on this machine's CPU")
    if args.measure and args.budget_mib is None:
        raise ValueError("--measure needs --budget-mib, the live bytes of a rank")
    if not args.measure and args.budget_mib is not None:
        raise ValueError("--budget-mib is the budget of --measure; give --device a number of GiB")
    if not args.measure and args.device is None:
        raise ValueError("--device is missing; name one, or measure with --measure")


def table(results: list[Result]) -> str:
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


def deeper(results: list[Result], run: RunConfig, num_layers: int) -> str:
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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """This script's arguments, and those that are configuration keys."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="the run's TOML file")
    parser.add_argument("--world-size", type=at_least_1, required=True, help="ranks of the run")
    parser.add_argument("--device", help="such as h100-80g, or a number of GiB")
    parser.add_argument(
        "--variants", type=variants, default=list(VARIANTS),
        help=f"any of {','.join(VARIANTS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="real steps on CPU ranks")
    parser.add_argument("--budget-mib", type=above_0, help="live bytes of a rank, with --measure")
    parser.add_argument(
        "--for-layers", type=at_least_1, metavar="N",
        help="also say what the growth per token would be at N layers that keep their input only",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parse_with_keys(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
