"""Converts weights between Hugging Face folders and this project's checkpoints.

    python scripts/convert_hf.py config --hf-dir DIR
        prints the [model] section of the folder's config.json
    python scripts/convert_hf.py check --hf-dir DIR --config FILE
        compares configuration, names and shapes, and lists what is missing or unexpected
    python scripts/convert_hf.py from-hf --hf-dir DIR --config FILE --out CHECKPOINT
    python scripts/convert_hf.py to-hf --checkpoint CHECKPOINT --config FILE --out DIR

Weights go through memory a few tensors at a time, whatever the size of the model. A conversion that
is killed goes on where it was when the same command is given again. Any key of the configuration
can be given behind the options, as to train.py. Exit code 2: the input is wrong, in one line.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from titan_relay.config import ConfigError, load_config
from titan_relay.units import in_gib
from titan_relay.validate import validate_model

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the process's exit code."""
    arguments, keys = _parser().parse_known_args(argv)
    from titan_relay.titan.hf.errors import HfError  # imports torch

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        return _run(arguments, keys)
    except (ConfigError, HfError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="print [model] of a folder's config.json")
    check = commands.add_parser("check", help="compare a folder with a configuration")
    from_hf = commands.add_parser("from-hf", help="Hugging Face folder to checkpoint")
    to_hf = commands.add_parser("to-hf", help="checkpoint to Hugging Face folder")
    for each in (config, check, from_hf):
        each.add_argument("--hf-dir", type=Path, required=True, help="the Hugging Face folder")
    for each in (check, from_hf, to_hf):
        each.add_argument("--config", required=True, help="the run's TOML file")
    for each in (check, from_hf):
        each.add_argument(
            "--skip", default="", help="regular expression: tensors to leave out, if unexpected"
        )
    to_hf.add_argument("--checkpoint", type=Path, required=True, help="a step-N folder, as a rule")
    to_hf.add_argument(
        "--assets",
        type=Path,
        help="folder with config.json and tokenizer files to copy (default: config.json of the "
        "folder that the checkpoint was converted from, tokenizer of the configuration)",
    )
    to_hf.add_argument("--shard-gb", type=float, default=5.0, help="largest file (default 5)")
    for each in (from_hf, to_hf):
        each.add_argument("--out", type=Path, required=True, help="an empty or new folder")
        each.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: as it is)")
    return parser


def _run(arguments: argparse.Namespace, keys: list[str]) -> int:
    import torch

    from titan_relay.titan.hf.config_json import toml_of
    from titan_relay.titan.hf.export import tokenizer_of
    from titan_relay.titan.hf.folder import read_config
    from titan_relay.titan.hf.from_hf import from_hf, open_checked
    from titan_relay.titan.hf.progress import peak_memory_bytes
    from titan_relay.titan.hf.to_hf import to_hf

    if arguments.command == "config":
        if keys:
            raise ConfigError(f"command line: {keys[0]}: not an option of config")
        print(toml_of(read_config(arguments.hf_dir)), end="")
        return 0
    loaded = load_config(["--config", arguments.config, *keys])
    run = loaded.config
    validate_model(run, loaded.sources)
    if arguments.command == "check":
        folder, _ = open_checked(arguments.hf_dir, run.model, skip=arguments.skip)
        print(f"{arguments.hf_dir} fits: {len(folder.places)} tensors, {folder.num_bytes} bytes")
        return 0
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    start = time.monotonic()
    if arguments.command == "from-hf":
        from_hf(arguments.hf_dir, run.model, arguments.out, dtype=dtype, skip=arguments.skip)
    else:
        to_hf(
            arguments.checkpoint,
            run.model,
            arguments.out,
            dtype=dtype,
            assets=arguments.assets,
            tokenizer=[] if arguments.assets else tokenizer_of(run.tokenizer),
            shard_bytes=int(arguments.shard_gb * 1e9),
        )
    print(
        f"{arguments.out}: done in {time.monotonic() - start:.0f} s, "
        f"peak memory {in_gib(peak_memory_bytes())}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
