"""Speed of the fused kernels on a GPU, against what PyTorch offers and what the chip can do.

    python scripts/bench_kernels.py                       # the four models' layers, 16384 tokens
    python scripts/bench_kernels.py --preset mixtral-8x7b --tokens 8192

For each layer shape: forward and backward against ``torch._grouped_mm`` with separate gather,
SwiGLU and scatter; each op by itself; and as ceilings one dense product of as many multiply-adds,
and the speed of a copy. Results are compared before they are timed. ``--interpret`` runs everything
at a small size through Triton's interpreter, on a machine without a GPU; its times mean nothing.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import torch

from kernel_bench.report import Row, table
from kernel_bench.timing import Timer, kernels_can_run
from layer_bench.setting import PRESETS
from titan_relay.commands.arguments import (
    at_least_0,
    at_least_1,
    file_to_write,
    script_parser,
    write_json,
)

TINY = (32, 16, 2, 1)  # D, F, E, K for the interpreter
TINY_TOKENS = 9
ROWS_PER_STEP = (4096, 16384)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if not kernels_can_run("bench_kernels", args.interpret):
        return 2
    results = []
    for number, name in enumerate(args.preset, start=1):
        print(f"layer {number} of {len(args.preset)}: {name}", file=sys.stderr, flush=True)
        description, rows = measure(args, name)
        print(f"### {description}\n\n{table(rows)}\n", flush=True)
        results += [{"layer": name, **dataclasses.asdict(row)} for row in rows]
    if args.json:
        write_json(args.json, results)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--tokens", type=at_least_1, default=16384)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--skew", type=at_least_0, default=0.0, help="Zipf exponent; 0: uniform")
    parser.add_argument("--iters", type=at_least_1, default=20)
    parser.add_argument("--warmup", type=at_least_1, default=5)
    parser.add_argument("--rows-per-step", type=at_least_1, nargs="+", default=ROWS_PER_STEP)
    parser.add_argument("--interpret", action="store_true", help="try out without a GPU")
    parser.add_argument(
        "--json",
        type=file_to_write,
        metavar="FILE",
        help="write the tables' rows as a list",
    )
    return parser.parse_args(argv)


def measure(args: argparse.Namespace, name: str) -> tuple[str, list[Row]]:
    """Everything about one layer shape."""
    # These import triton, so only now.
    from kernel_bench.compare import measure_layer
    from kernel_bench.problem import make_problem

    device = torch.device("cpu" if args.interpret else "cuda")
    shape, num_tokens, rows = PRESETS[name], args.tokens, list(args.rows_per_step)
    iterations, warmup = args.iters, args.warmup
    if args.interpret:
        shape, num_tokens, rows, iterations, warmup = TINY, TINY_TOKENS, [16], 1, 0
    problem = make_problem(
        name, shape, num_tokens, args.skew, getattr(torch, args.dtype), device
    )  # fmt: skip
    timer = Timer(device, iterations, warmup)
    return problem.description, measure_layer(problem, timer, "triton", rows)


if __name__ == "__main__":
    sys.exit(main())
