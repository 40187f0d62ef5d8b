"""What a run needs before it starts: memory by owner, the relay's rings, whether it fits.

    titan-relay plan --config FILE.toml --world-size 4 --device cpu
    titan-relay plan --config FILE.toml --world-size 64 --device h100-80g --seq-len 65536

Runs the trainer's own step on fake tensors for one rank of `--world-size`; needs no GPU, no data
and no other process. Further arguments are configuration keys, as for train. Exit code 1: it does
not fit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from titan_relay.commands import arguments as arg
from titan_relay.config import ConfigError, Loaded, RunConfig, load_config
from titan_relay.validate import validate

EXIT_DOES_NOT_FIT = 1
SECONDS_BETWEEN_LINES = 10.0


def main(arguments: Sequence[str]) -> int:
    args, keys = arg.parse_with_keys(parser(), arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake CPU tensors stand for a device's
    loaded = _load(args.config, keys, args.seq_len)
    validate(loaded.config, args.world_size, loaded.origins, files=False)
    _check(args, loaded.config)
    device = arg.device_of(args.device)
    from titan_relay.titan.plan.changes import nearest_changes
    from titan_relay.titan.plan.picture import draw_step
    from titan_relay.titan.plan.plan import plan_run
    from titan_relay.titan.plan.report import plan_json, plan_lines, when

    def tell(text: str) -> None:
        if not args.json:
            print(text, file=sys.stderr)

    run, about = loaded.config, {"rank": args.rank, "skew": args.skew}
    tell(f"One step of {run.model.num_layers} layers on fake tensors ...")
    plan = plan_run(run, args.world_size, device, **about, watch=_every_few_seconds(tell, when))
    changes = []
    if plan.fits is False:
        tell("Looking for changes that would make it fit ...")
        changes = nearest_changes(run, args.world_size, device, plan.peak_bytes, **about)
    if args.picture:
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        title = f"{args.config}, rank {args.rank} of {args.world_size} on {device.name}"
        draw_step(plan.memory.curve, title, args.picture, device.usable_bytes)
    if args.json:
        listed = [asdict(change) for change in changes]
        print(json.dumps(plan_json(plan) | {"changes": listed}, indent=2))
    else:
        print("\n".join(plan_lines(plan, changes)))
    return EXIT_DOES_NOT_FIT if plan.fits is False else 0


def parser() -> arg.CommandParser:
    """The command's options."""
    parser = arg.command_parser("plan", __doc__)
    arg.add_run_options(parser, device_needed=True)
    parser.add_argument("--seq-len", type=arg.at_least_1, help="instead of training.seq_len")
    parser.add_argument("--rank", type=arg.whole_number, default=0, help="whose step (default 0)")
    parser.add_argument(
        "--skew", type=arg.above_0, default=1.0,
        help="rows that the all-to-all brings the rank, over a balanced router's (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--picture", type=arg.picture_to_write, metavar="FILE.svg", help="draw memory over the step"
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser


def _load(config: str, keys: list[str], seq_len: int | None) -> Loaded:
    """The run's configuration; `seq_len` may be longer than the model's tables are made for."""
    arguments = ["--config", config, *keys]
    loaded = load_config(arguments)
    given = [key for key in keys if key.partition("=")[0] == "--training.seq_len"]
    if seq_len is not None and given:
        raise ConfigError(f"--seq-len {seq_len}: {given[0]} is there, too; give one of them")
    if seq_len is None:
        return loaded
    longest = max(seq_len, loaded.config.model.max_seq_len)
    arguments += ["--training.seq_len", str(seq_len), "--model.max_seq_len", str(longest)]
    return load_config(arguments)


def _check(args: argparse.Namespace, run: RunConfig) -> None:
    """Raise `ConfigError` for a rank or a skew that the run does not have."""
    if args.rank >= args.world_size:
        highest = args.world_size - 1
        raise ConfigError(f"--rank {args.rank}: must be from 0 to {highest}, below --world-size")
    if args.skew != 1 and run.relay.dispatcher == "relay":
        raise ConfigError(
            f"--skew {args.skew:g}: the relay's memory is the same for every routing; leave it "
            "out, or plan --relay.dispatcher alltoall"
        )


def _every_few_seconds(
    tell: Callable[[str], None], in_words: Callable[[str], str]
) -> Callable[[str], None]:
    """Tells, but not too often, where in the step a plan is."""
    begin_s = told_s = time.monotonic()

    def watch(phase: str) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= SECONDS_BETWEEN_LINES:
            tell(f"  {now_s - begin_s:.0f} s: {in_words(phase)}")
            told_s = now_s

    return watch
