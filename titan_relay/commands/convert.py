"""Converts weights between Hugging Face folders and this project's checkpoints.

    titan-relay convert config --hf-dir DIR
    titan-relay convert check --hf-dir DIR --config FILE.toml
    titan-relay convert from-hf --hf-dir DIR --config FILE.toml --out CHECKPOINT
    titan-relay convert to-hf --checkpoint CHECKPOINT --config FILE.toml --out DIR

Weights go through memory a few tensors at a time, whatever the size of the model. A conversion that
is killed goes on where it was when the same command is given again. Any key of the configuration
can be given behind the options, as to train. Exit code 2: the input is wrong, in one line.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence

from titan_relay.commands import arguments as arg
from titan_relay.config import ConfigError, RunConfig, load_config
from titan_relay.config.errors import either
from titan_relay.config.suggest import nearest
from titan_relay.units import in_gib
from titan_relay.validate import validate_model

DTYPES = ("float32", "bfloat16", "float16")
_ACTIONS = {
    "config": ("print the [model] section of a folder's config.json", "--hf-dir DIR"),
    "check": (
        "compare configuration, names and shapes, and list what is missing or unexpected",
        "--hf-dir DIR --config FILE.toml",
    ),
    "from-hf": (
        "convert a Hugging Face folder to a checkpoint",
        "--hf-dir DIR --config FILE.toml --out CHECKPOINT",
    ),
    "to-hf": (
        "convert a checkpoint to a Hugging Face folder",
        "--checkpoint CHECKPOINT --config FILE.toml --out DIR",
    ),
}


def main(arguments: Sequence[str]) -> int:
    args, keys = _parse(arguments)
    if args.action == "config":
        from titan_relay.titan.hf.config_json import toml_of
        from titan_relay.titan.hf.folder import read_config

        print(toml_of(read_config(args.hf_dir)), end="")
        return 0
    loaded = load_config(["--config", args.config, *keys])
    validate_model(loaded.config, loaded.origins)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    from titan_relay.titan.hf.from_hf import open_checked

    if args.action == "check":
        folder, _ = open_checked(args.hf_dir, loaded.config.model, skip=args.skip)
        print(f"{args.hf_dir} fits: {len(folder.places)} tensors, {folder.num_bytes} bytes")
        return 0
    try:
        _convert(args, loaded.config)
    except KeyboardInterrupt:
        print("the same command goes on from here", file=sys.stderr)
        raise
    return 0


def parser() -> arg.CommandParser:
    """The command's options, an action's in a parser of its own."""
    parser = arg.command_parser("convert", __doc__)
    into = parser.add_subparsers(dest="action", required=True)
    for name, (text, options) in _ACTIONS.items():
        about = f"{text[0].upper()}{text[1:]}.\n\n    titan-relay convert {name} {options}"
        parser.actions[name] = into.add_parser(name, help=text, description=about)
    config, check, from_hf, to_hf = parser.actions.values()
    for each in (config, check, from_hf):
        each.add_argument(
            "--hf-dir", type=arg.a_path, required=True, help="the Hugging Face folder"
        )
    for each in (check, from_hf, to_hf):
        arg.add_config(each)
    for each in (check, from_hf):
        each.add_argument(
            "--skip", default="", help="regular expression: tensors to leave out, if unexpected"
        )
    to_hf.add_argument(
        "--checkpoint", type=arg.a_path, required=True, help="a step-N folder, as a rule"
    )
    to_hf.add_argument(
        "--assets",
        type=arg.a_path,
        help="folder with config.json and tokenizer files to copy (default: config.json of the "
        "folder that the checkpoint was converted from, tokenizer of the configuration)",
    )
    to_hf.add_argument("--shard-gb", type=arg.above_0, default=5.0, help="largest file (default 5)")
    for each in (from_hf, to_hf):
        each.add_argument(
            "--out", type=arg.folder_to_write, required=True, help="an empty or new folder"
        )
        each.add_argument(
            "--dtype", type=arg.one_of(*DTYPES),
            help=f"{either(DTYPES)}, of the parameters (default: as it is)",
        )  # fmt: skip
    return parser


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own arguments, and those that are configuration keys."""
    made = parser()
    if arguments and arguments[0] not in ("-h", "--help"):
        name = arguments[0]
        if name not in made.actions:
            close = nearest(name, made.actions)
            fix = f"did you mean {close}?" if close else f"name one of {either(made.actions)} first"
            made.error(f"{name}: no such action; {fix}")
        arg.refuse_unknown_options(made.actions[name], arguments)
    args, keys = made.parse_known_args(arguments)
    if args.action == "config":
        arg.refuse_keys(made.actions["config"], keys)
    return args, keys


def _convert(args: argparse.Namespace, run: RunConfig) -> None:
    import torch

    from titan_relay.titan.hf.export import tokenizer_of
    from titan_relay.titan.hf.from_hf import from_hf
    from titan_relay.titan.hf.to_hf import ExportOptions, to_hf
    from titan_relay.titan.metrics.memory import resident_peak_bytes

    dtype = getattr(torch, args.dtype) if args.dtype else None
    start = time.monotonic()
    if args.action == "from-hf":
        from_hf(args.hf_dir, run.model, args.out, dtype=dtype, skip=args.skip)
    else:
        if args.assets and not args.assets.is_dir():
            raise ConfigError(f"--assets {args.assets}: no such folder")
        tokenizer = [] if args.assets else tokenizer_of(run.tokenizer)
        options = ExportOptions(dtype, args.assets, tokenizer, max(1, int(args.shard_gb * 1e9)))
        to_hf(args.checkpoint, run.model, args.out, options)
    print(
        f"{args.out}: done in {time.monotonic() - start:.0f} s, "
        f"peak memory {in_gib(resident_peak_bytes())}"
    )
