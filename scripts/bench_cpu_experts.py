"""The experts of one rank on a CPU: relay_kernels' PyTorch steps against ``torch._grouped_mm``.

    python scripts/bench_cpu_experts.py
    python scripts/bench_cpu_experts.py --without-products

The other side is what a layer over ``torch._grouped_mm`` does: gather the routed rows, two grouped
products, SwiGLU, a grouped product, scores, sum per token; its backward is autograd's. The relay's
backward starts from the inputs alone, so the other backward recomputes its forward, too.

Times are CPU time of one thread (of a shared machine the wall says little), medians over rounds in
which both sides run, each first in every other round, because the second finds warmer caches; a
ratio is the median of the rounds' ratios. Where ``torch._grouped_mm`` refuses a shape, the table
says so. Both sides are compared with each other first. The table goes to standard output as
Markdown.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch

from kernel_bench import unfused
from kernel_bench.problem import Problem, make_problem
from layer_check.dense_truth import relative_error
from relay_kernels import (
    ExpertWeights,
    Gradients,
    StepShape,
    SwiGLU,
    backward_experts_,
    backward_workspace,
    forward_experts_,
    forward_workspace,
)
from titan_relay.commands.arguments import script_parser

CPU = torch.device("cpu")
ROWS_PER_STEP = 512  # what the trainer takes on a CPU
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COLUMNS = [
    *("dtype", "T", "D", "F", "E", "K", "skew"),
    *("forward, ms", "grouped", "ratio", "backward, ms", "grouped", "ratio"),
]
# T tokens, D, F, E experts, K choices, Zipf exponent of the routing.
SHAPES = [
    (1024, 256, 128, 32, 8, 0),
    (1024, 256, 128, 32, 8, 2),
    (1024, 256, 512, 32, 2, 0),
    (512, 512, 192, 64, 8, 0),
    (64, 256, 128, 32, 2, 0),
    (1024, 512, 1792, 8, 2, 0),
    (1024, 512, 1792, 8, 2, 2),
    (512, 1024, 384, 32, 4, 0),
    (512, 250, 90, 7, 3, 0),
]


def step_shape(problem: Problem) -> StepShape:
    _, hidden, dim = problem.weights.w1_gFD.shape
    rows = min(ROWS_PER_STEP, problem.num_rows)
    return StepShape(rows, dim, hidden, problem.x_TD.dtype, CPU, kernels="torch")


def relay_forward(problem: Problem) -> torch.Tensor:
    out_TD, workspace = torch.zeros_like(problem.x_TD), forward_workspace(step_shape(problem))
    forward_experts_(out_TD, problem.tokens, problem.weights, SwiGLU(), workspace)
    return out_TD


def relay_backward(problem: Problem) -> list[torch.Tensor]:
    tokens, weights = problem.tokens, problem.weights
    dweights = weights.empty_like(weights.num_experts)
    dx_TD, dscores_TK = torch.zeros_like(tokens.x_TD), torch.zeros_like(tokens.scores_TK)
    workspace = backward_workspace(step_shape(problem), tokens.x_TD.dtype)
    into = Gradients(dx_TD, dscores_TK, dweights)
    backward_experts_(into, problem.dout_TD, tokens, weights, SwiGLU(), workspace)
    return [dx_TD, dscores_TK, *dweights.tensors()]


def grouped_backward(problem: Problem) -> list[torch.Tensor]:
    inputs = [problem.x_TD, problem.tokens.scores_TK, *problem.weights.tensors()]
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    x_TD, scores_TK, *weights = leaves
    tokens = replace(problem.tokens, x_TD=x_TD, scores_TK=scores_TK)
    out_TD = unfused.forward(replace(problem, tokens=tokens, weights=ExpertWeights(*weights)))
    return list(torch.autograd.grad(out_TD, leaves, problem.dout_TD))


def check_same(left: list[torch.Tensor], right: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Both sides compute the same: to 1e-4 in float32, to a few roundings in bfloat16."""
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    error = max(relative_error(*pair) for pair in zip(left, right, strict=True))
    if error > tolerance:
        sys.exit(f"error: the two sides differ by {error:.1e}, more than {tolerance}")


def paired_ms(
    mine: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> tuple[float, float, float]:
    """Median CPU times of both in milliseconds, and the median of theirs over mine."""
    pairs: list[tuple[float, float]] = []
    for index in range(rounds + 1):
        if index % 2:
            second, first = taken_ms(theirs), taken_ms(mine)
            pair = first, second
        else:
            pair = taken_ms(mine), taken_ms(theirs)
        if index > 0:  # the first warms up
            pairs.append(pair)
    ratio = statistics.median(other / own for own, other in pairs)
    own_ms, other_ms = (statistics.median(times) for times in zip(*pairs, strict=True))
    return own_ms, other_ms, ratio


def taken_ms(function: Callable[[], object]) -> float:
    """CPU time of one call, in milliseconds."""
    start = time.thread_time()
    function()
    return 1e3 * (time.thread_time() - start)


@contextlib.contextmanager
def no_products() -> Iterator[None]:
    """Both sides' products leave their results as the memory was; it is allocated all the same."""

    def mm(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out

    def grouped(left: torch.Tensor, right: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        return left.new_empty(left.shape[0], right.shape[-1])

    with mock.patch.object(torch, "mm", mm), mock.patch.object(torch, "_grouped_mm", grouped):
        yield


def row(shape: tuple[int, ...], name: str, rounds: int, products: bool) -> str:
    """One line of the table."""
    num_tokens, dim, hidden, experts, top_k, skew = shape
    sizes = (dim, hidden, experts, top_k)
    problem = make_problem(name, sizes, num_tokens, skew, DTYPES[name], CPU)
    grouped = functools.partial(unfused.forward, problem)
    title = f"| {name} | {' | '.join(str(size) for size in shape)} |"
    try:
        reference = [grouped()]
    except RuntimeError as refusal:
        if "stride" not in str(refusal):
            raise
        if not products:
            return f"{title} | refused | | | | |"
        forward, backward = (
            statistics.median(taken_ms(functools.partial(run, problem)) for _ in range(rounds))
            for run in (relay_forward, relay_backward)
        )
        return f"{title} {forward:.1f} | refused | | {backward:.1f} | refused | |"
    check_same([relay_forward(problem)], reference, problem.dout_TD.dtype)
    if not products:
        with no_products():
            own, other, ratio = paired_ms(lambda: relay_forward(problem), grouped, rounds)
        return f"{title} {own:.2f} | {other:.2f} | {ratio:.2f} | | | |"
    check_same(relay_backward(problem), grouped_backward(problem), problem.dout_TD.dtype)
    pairs = (
        paired_ms(lambda: relay_forward(problem), grouped, rounds),
        paired_ms(lambda: relay_backward(problem), lambda: grouped_backward(problem), rounds),
    )
    columns = [f"{own:.1f} | {other:.1f} | {ratio:.2f}" for own, other, ratio in pairs]
    return f"{title} {' | '.join(columns)} |"


def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds per shape")
    parser.add_argument(
        "--shape", type=int, nargs=6, metavar=("T", "D", "F", "E", "K", "SKEW"), help="only this"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="only this one")
    parser.add_argument(
        "--without-products", action="store_true", help="the forward without its products"
    )
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    if args.shape and (min(args.shape[:5]) < 1 or args.shape[5] < 0):
        parser.error(f"--shape {args.shape}: sizes must be at least 1, SKEW at least 0")
    if args.shape and args.shape[4] > args.shape[3]:
        parser.error(f"--shape: K = {args.shape[4]} must be at most E = {args.shape[3]}")
    torch.set_num_threads(1)
    shapes = [tuple(args.shape)] if args.shape else SHAPES
    print(f"| {' | '.join(COLUMNS)} |")
    print("|" + "---|" * len(COLUMNS))
    started = time.monotonic()
    names = [args.dtype] if args.dtype else list(DTYPES)
    runs = [(shape, name) for name in names for shape in shapes]
    for index, (shape, name) in enumerate(runs):
        print(row(shape, name, args.rounds, not args.without_products), flush=True)
        elapsed = time.monotonic() - started
        left = elapsed / (index + 1) * (len(runs) - index - 1)
        print(f"{index + 1} of {len(runs)}, about {left:.0f} s to go", file=sys.stderr)


if __name__ == "__main__":
    main()
