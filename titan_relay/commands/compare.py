"""Compares one step of this trainer with the same step in transformers, for a Hugging Face folder.

    titan-relay compare --hf-dir DIR --config FILE.toml
    titan-relay compare --hf-dir DIR --config FILE.toml --ep 2 --circulate tokens
    titan-relay compare --hf-dir DIR --config FILE.toml --ep 2 --dispatcher alltoall
    titan-relay compare --hf-dir DIR --config FILE.toml --cp 2

Logits, loss and the gradient of every parameter, in float32, on random tokens. Prints the largest
differences, each relative to the largest value of its tensor. Exit code 0: all within --tolerance;
1: not; 2: the input is wrong, in one line. The command starts its own ranks. transformers runs on
CPU and needs 8 bytes a parameter there.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_relay.commands import arguments as arg
from titan_relay.config import ConfigError, RunConfig, load_config
from titan_relay.config.errors import either
from titan_relay.validate import validate, validate_model

if TYPE_CHECKING:
    from titan_relay.titan.hf_compare import Comparison

EXIT_DIFFERS = 1
_SHOWN = 10
_MOST_TOKENS = 2**24  # of whose logits several copies are made
_CHOICES = {
    "--dispatcher": ("relay", "alltoall"),
    "--circulate": ("auto", "experts", "tokens"),
}


def main(arguments: Sequence[str]) -> int:
    args, keys = _parse(arguments)
    loaded = load_config(["--config", args.config, *keys])
    validate_model(loaded.config, loaded.origins)
    return _report(_compare(args, loaded.config), args.tolerance)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own arguments, and those that are configuration keys."""
    args, keys = arg.parse_with_keys(parser(), arguments)
    if args.ep % args.cp and args.cp % args.ep:
        raise ConfigError(f"--cp {args.cp}: must divide --ep {args.ep}, or be a multiple of it")
    if args.rows * args.seq_len > _MOST_TOKENS:
        raise ConfigError(
            f"--rows {args.rows}: with --seq-len {args.seq_len} that is more than {_MOST_TOKENS} "
            "tokens; ask for fewer"
        )
    if find_spec("transformers") is None:
        raise ConfigError(
            "titan-relay compare: transformers is not installed; pip install 'titan-relay[compare]'"
        )
    return args, keys


def parser() -> arg.CommandParser:
    """The command's options."""
    parser = arg.command_parser("compare", __doc__)
    parser.add_argument("--hf-dir", type=arg.a_path, required=True, help="the Hugging Face folder")
    arg.add_config(parser)
    parser.add_argument("--ep", type=arg.at_least_1, default=1, help="expert-parallel ranks")
    parser.add_argument("--cp", type=arg.at_least_1, default=1, help="context-parallel ranks")
    for option, words in _CHOICES.items():
        about = f"{either(words)} (default {words[0]})"
        parser.add_argument(option, type=arg.one_of(*words), default=words[0], help=about)
    parser.add_argument("--rows", type=arg.at_least_1, default=2, help="sequences (default 2)")
    parser.add_argument(
        "--seq-len", type=arg.at_least_1, default=64, help="tokens of each (default 64)"
    )
    parser.add_argument("--seed", type=arg.whole_number, default=0, help="of the random tokens")
    parser.add_argument(
        "--tolerance", type=arg.at_least_0, default=1e-5, help="relative (default 1e-5)"
    )
    return parser


def _compare(args: argparse.Namespace, config: RunConfig) -> Comparison:
    import torch

    from titan_relay.local_ranks import on_ranks
    from titan_relay.titan.hf.from_hf import open_checked
    from titan_relay.titan.hf_compare import Layout, comparison_run, reference_step

    layout = Layout(args.ep, args.cp, args.dispatcher, args.circulate)
    num_ranks = layout.num_ranks
    num_rows = -(-args.rows * layout.cp // num_ranks) * num_ranks // layout.cp
    generator = torch.Generator().manual_seed(args.seed)
    shape = (num_rows, args.seq_len + 1)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    with tempfile.TemporaryDirectory(prefix="compare") as temporary:
        folder = Path(temporary)
        with _step("1 of 3: names and shapes"):
            open_checked(args.hf_dir, config.model)
        run = comparison_run(config, layout, args.hf_dir, folder, shape)
        validate(run, num_ranks, "command line")
        with _step("2 of 3: transformers"):
            reference_step(args.hf_dir, tokens, folder)
        with _step(f"3 of 3: this trainer on {num_ranks} rank(s)"):
            comparison: Comparison = on_ranks(
                *(_on_rank, run, tokens, folder),
                world_size=num_ranks,
                device="cuda" if torch.cuda.is_available() else "cpu",
                num_threads=max(1, (os.cpu_count() or 1) // num_ranks),
            )
    return comparison


def _on_rank(run: RunConfig, tokens: Any, folder: Path) -> Comparison | None:
    from titan_relay.titan.hf_compare import compare_on_rank

    logging.disable(logging.WARNING)
    return compare_on_rank(run, tokens, folder)


@contextmanager
def _step(label: str) -> Iterator[None]:
    """Says what is going on, and how long it took."""
    print(f"{label} ...", flush=True)
    start = time.monotonic()
    yield
    print(f"{label}: {time.monotonic() - start:.0f} s", flush=True)


def _report(comparison: Comparison, tolerance: float) -> int:
    print(f"{'':60}{'largest':>12}{'of':>12}{'relative':>12}")
    gradients = comparison.gradients
    rows = [("logits", comparison.logits), ("loss", comparison.loss)]
    rows += [(f"gradient of {each.name}", each) for each in gradients[:_SHOWN]]
    for label, each in rows:
        print(f"{label:60}{each.largest:12.3e}{each.scale:12.3e}{each.relative:12.3e}")
    if len(gradients) > _SHOWN:
        print(f"... and {len(gradients) - _SHOWN} gradients that differ less")
    worst = comparison.worst
    same = worst.relative <= tolerance
    verdict = "the same function" if same else "NOT the same function"
    sign = "<=" if same else ">"
    print(f"{verdict}: {worst.name} differs by {worst.relative:.1e} {sign} {tolerance:.0e}")
    return 0 if same else EXIT_DIFFERS
