"""Writes a real text corpus without a download: the source of this machine's standard library.

    titan-relay corpus --out outputs/corpus

gives ``train.jsonl`` and ``validation.jsonl`` with one object ``{"text", "path"}`` a line; which
files are in which part depends on their paths only, so it is the same on every machine.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from titan_relay.commands import arguments as arg
from titan_relay.config import ConfigError
from titan_relay.data.corpus import collect, write_part
from titan_relay.units import in_mb


def main(arguments: Sequence[str]) -> int:
    args = _parse(arguments)
    corpus = collect(args.source, args.max_bytes, args.validation_share)
    if not corpus.train or not corpus.validation:
        raise ConfigError(
            f"--source {args.source}: has {len(corpus.train)} training and "
            f"{len(corpus.validation)} validation files, and both are needed: raise --max-bytes or "
            "--validation-share, or give another folder"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    for part, documents in (("train", corpus.train), ("validation", corpus.validation)):
        path = args.out / f"{part}.jsonl"
        num_bytes = write_part(path, documents)
        print(f"{path}: {len(documents)} documents, {in_mb(num_bytes)}")
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(corpus.left_out.items()))
    print(f"left out: {reasons or 'nothing'}")
    return 0


def parser() -> arg.CommandParser:
    """The command's options."""
    parser = arg.command_parser("corpus", __doc__)
    parser.add_argument(
        "--out", type=arg.folder_to_write, default="outputs/corpus",
        help="folder to write (default outputs/corpus)",
    )  # fmt: skip
    parser.add_argument("--max-bytes", type=arg.at_least_1, help="take at most this much text")
    parser.add_argument(
        "--validation-share", type=arg.above_0, default=0.05,
        help="share of the files held out (default 0.05)",
    )  # fmt: skip
    parser.add_argument(
        "--source",
        type=arg.a_path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder of Python files (default: this interpreter's standard library)",
    )
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    args = arg.parse(parser(), arguments)
    if args.validation_share >= 1:
        raise ConfigError(f"--validation-share {args.validation_share:g}: must be below 1")
    if not args.source.is_dir():
        raise ConfigError(f"--source {args.source}: is not a folder; give one with Python files")
    return args
