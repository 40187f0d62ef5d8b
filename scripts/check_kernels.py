"""Compile every kernel in every tuned configuration and read its machine code; needs no GPU.

    python scripts/check_kernels.py --arch sm_80,sm_90,sm_100

Prints a table: registers, spilled and stack bytes per thread, shared memory of a block, tensor-core
instructions in loops, and how wide loads from global memory in loops are. Exit code 1 and a line
per fault if a kernel does not compile, spills, has no tensor-core main loop, or needs more shared
memory than the chip has. A second run takes what it can from Triton's cache.
"""

import argparse
import importlib
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from kernel_check.chips import CHIPS
from kernel_check.compile import measure
from kernel_check.table import Row, table
from kernel_check.variant import KernelVariant
from titan_relay.commands.arguments import script_parser

REGISTRY = "kernel_check.registry:variants"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Architecture, dtype's name, position in the registry: a kernel itself cannot cross processes.
Job = tuple[str, str, int]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("error: TRITON_INTERPRET = 1 turns the compiler off; unset it", file=sys.stderr)
        return 2
    begin_s = time.perf_counter()
    try:
        jobs = _jobs(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    import triton  # only here: the script explains itself without it

    rows = sorted(_rows(args, jobs), key=lambda row: (row.name, args.arch.index(row.arch)))
    print(table(rows))
    lines = [line for row in rows for line in row.fault_lines()]
    print(
        f"\n{len(rows)} kernels for {', '.join(args.arch)} with triton {triton.__version__} in "
        f"{time.perf_counter() - begin_s:.0f} s: {len(lines) or 'no'} fault"
        f"{'' if len(lines) == 1 else 's'}"
    )
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--arch", type=_list_of(CHIPS), default=list(CHIPS), metavar="LIST",
        help=f"comma-separated, of {', '.join(CHIPS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", type=_list_of(DTYPES), default=list(DTYPES), metavar="LIST",
        help=f"comma-separated, of {', '.join(DTYPES)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT",
        help="kernels whose name (KERNEL/LAYER/DTYPE) contains one of these",
    )  # fmt: skip
    parser.add_argument(
        "--registry", default=REGISTRY, metavar="MODULE:FUNCTION",
        help="what lists the kernels, called with architecture and dtype (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: must be at least 1")
    return args


def _jobs(args: argparse.Namespace) -> list[Job]:
    """What to compile. Raises `ValueError` where that is nothing, or the registry is not there."""
    jobs, names = [], set()
    for arch in args.arch:
        for dtype in args.dtype:
            for index, variant in enumerate(_variants(args.registry, arch, dtype)):
                names.add(variant.name.partition("/")[0])
                if any(text in variant.name for text in args.only):
                    jobs.append((arch, dtype, index))
    if not jobs:
        wanted = " or ".join(args.only)
        raise ValueError(
            f"no kernel's name contains {wanted}; there are {', '.join(sorted(names)) or 'none'}"
        )
    return jobs


def _list_of(allowed: Collection[str]) -> Callable[[str], list[str]]:
    def words(text: str) -> list[str]:
        for name in text.split(","):
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(allowed)}")
        return list(dict.fromkeys(text.split(",")))

    return words


def _variants(registry: str, arch: str, dtype: str) -> list[KernelVariant]:
    module, _, function = registry.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--registry {registry}: {error}") from error
    return list(found(arch, DTYPES[dtype]))


def _rows(args: argparse.Namespace, jobs: Sequence[Job]) -> Iterator[Row]:
    """Every job's row, as they finish."""
    from titan_relay.local_ranks import end_with_parent  # the path is complete by now

    # Fresh interpreters: a fork would copy threads that torch may have started.
    context = multiprocessing.get_context("spawn")
    workers = min(args.workers, len(jobs))
    begin_s = time.perf_counter()
    with ProcessPoolExecutor(workers, context, end_with_parent) as pool:
        pending = [pool.submit(_row, args.registry, *job) for job in jobs]
        for count, done in enumerate(as_completed(pending), start=1):
            yield done.result()
            _show_progress(count, len(jobs), time.perf_counter() - begin_s)


def _row(registry: str, arch: str, dtype: str, index: int) -> Row:
    # A default of the compiler that a later version will change; said once per process.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    variant = _variants(registry, arch, dtype)[index]
    return Row.of(variant, arch, measure(variant, arch))


def _show_progress(count: int, total: int, elapsed_s: float) -> None:
    left_s = elapsed_s / count * (total - count)
    text = f"kernel {count} of {total}, {left_s:.0f} s left"
    if sys.stderr.isatty():
        print(f"\r{text:<40}", end="" if count < total else "\r", file=sys.stderr, flush=True)
    elif count % 25 == 0:
        print(text, file=sys.stderr, flush=True)


_ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(_ROOT), str(_ROOT / "kernels")]  # in every worker too

if __name__ == "__main__":
    sys.exit(main())
