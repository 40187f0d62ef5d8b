"""What a run needs before it starts: memory by owner, the relay's rings, whether it fits.

    python scripts/plan.py --config train_configs/demo.toml --world-size 4 --device cpu
    python scripts/plan.py --config FILE --world-size 64 --device h100-80g --seq-len 65536

Runs the trainer's own step on fake tensors for one rank of `--world-size`; needs no GPU, no data
and no other process. Further arguments are configuration keys, as for train.py. Exit code 1: it
does not fit.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Fake CPU tensors stand for the device's, whatever this machine has.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from longest.arguments import at_least_1, parse_with_keys

from titan_relay.config import Loaded, load_config
from titan_relay.measure.devices import device_named
from titan_relay.validate import validate

EXIT_DOES_NOT_FIT, EXIT_USER_ERROR = 1, 2
SECONDS_BETWEEN_LINES = 10.0


def main(argv: list[str] | None = None) -> int:
    args, keys = parse(argv)
    try:
        device = device_named(args.device)
        loaded = load(args.config, keys, args.seq_len)
        validate(loaded.config, args.world_size, loaded.sources, files=False)
        if not 0 <= args.rank < args.world_size:
            highest = args.world_size - 1
            raise ValueError(f"--rank {args.rank}: must be from 0 to {highest}, below --world-size")
        if not 0 < args.skew < math.inf:
            raise ValueError(f"--skew {args.skew}: must be a number above 0; 1 is balanced")
        if args.skew != 1 and loaded.config.relay.dispatcher == "relay":
            raise ValueError(
                f"--skew {args.skew:g}: the relay's memory is the same for every routing; leave it "
                "out, or plan --relay.dispatcher alltoall"
            )
        if args.picture and not Path(args.picture).resolve().parent.is_dir():
            raise ValueError(f"--picture {args.picture}: there is no such folder")
        if args.picture and Path(args.picture).is_dir():
            raise ValueError(f"--picture {args.picture}: is a folder; name a file in it")
    except ValueError as error:  # ConfigError among them
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    from titan_relay.measure.picture import svg_of
    from titan_relay.titan.plan.changes import nearest_changes
    from titan_relay.titan.plan.plan import plan_run
    from titan_relay.titan.plan.report import plan_json, plan_lines, when

    run = loaded.config
    if not args.json:
        print(f"One step of {run.model.num_layers} layers on fake tensors ...", file=sys.stderr)
    watch = None if args.json else Progress(when)
    plan = plan_run(run, args.world_size, device, rank=args.rank, skew=args.skew, watch=watch)
    changes = []
    if plan.fits is False:
        if not args.json:
            print("Looking for changes that would make it fit ...", file=sys.stderr)
        changes = nearest_changes(
            run, args.world_size, device, plan.peak_bytes, rank=args.rank, skew=args.skew
        )
    if args.picture:
        title = f"{args.config}, rank {args.rank} of {args.world_size} on {device.name}"
        Path(args.picture).write_text(svg_of(plan.memory.curve, title, plan.usable_bytes))
    if args.json:
        fields = ("settings", "peak_bytes", "fits")
        listed = [{name: getattr(change, name) for name in fields} for change in changes]
        print(json.dumps(plan_json(plan) | {"changes": listed}, indent=2))
    else:
        print("\n".join(plan_lines(plan, changes)))
    return EXIT_DOES_NOT_FIT if plan.fits is False else 0


class Progress:
    """Says every few seconds where in the step a plan is."""

    def __init__(self, in_words: Callable[[str], str]) -> None:
        self._in_words = in_words
        self._begin_s = self._said_s = time.monotonic()

    def __call__(self, phase: str) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= SECONDS_BETWEEN_LINES:
            print(f"  {now_s - self._begin_s:.0f} s: {self._in_words(phase)}", file=sys.stderr)
            self._said_s = now_s


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """This script's arguments, and those that are configuration keys."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="the run's TOML file")
    parser.add_argument("--world-size", type=at_least_1, required=True, help="ranks of the run")
    parser.add_argument("--device", required=True, help="such as h100-80g, a number of GiB, or cpu")
    parser.add_argument("--seq-len", type=at_least_1, help="instead of training.seq_len")
    parser.add_argument("--rank", type=int, default=0, help="whose step (default 0)")
    parser.add_argument(
        "--skew", type=float, default=1.0,
        help="rows that the all-to-all brings the rank, over a balanced router's (default 1)",
    )  # fmt: skip
    parser.add_argument("--picture", metavar="FILE.svg", help="draw memory over the step")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parse_with_keys(parser, argv)


def load(config: str, keys: list[str], seq_len: int | None) -> Loaded:
    """The run's configuration; `seq_len` may be longer than the model's tables are made for."""
    arguments = ["--config", config, *keys]
    loaded = load_config(arguments)
    given = [key for key in keys if key.partition("=")[0] == "--training.seq_len"]
    if seq_len is not None and given:
        raise ValueError(f"--seq-len {seq_len}: {given[0]} is there, too; give one of them")
    if seq_len is None:
        return loaded
    longest = max(seq_len, loaded.config.model.max_seq_len)
    arguments += ["--training.seq_len", str(seq_len), "--model.max_seq_len", str(longest)]
    return load_config(arguments)


if __name__ == "__main__":
    sys.exit(main())
