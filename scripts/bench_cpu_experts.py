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

import argparse
import contextlib
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch

from relay_kernels import (
    ExpertWeights,
    Gradients,
    RoutedTokens,
    StepShape,
    SwiGLU,
    backward_experts_,
    backward_workspace,
    forward_experts_,
    forward_workspace,
)

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


@dataclass(frozen=True)
class Layer:
    """One layer's inputs and routing. T tokens, K top-k, N = T * K rows, D, F, E as usual."""

    tokens: RoutedTokens
    dout_TD: torch.Tensor
    weights: ExpertWeights

    @staticmethod
    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Layer:
        tokens, dim, hidden, experts, top_k, skew = shape
        random = torch.Generator().manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(size, generator=random) * scale).to(dtype)

        noise = -torch.log(-torch.log(torch.rand(tokens, experts, generator=random)))
        liking = -skew * torch.log(torch.arange(1, experts + 1).float())
        ids_N = (liking + noise).topk(top_k, 1).indices.flatten()
        counts = torch.bincount(ids_N, minlength=experts).tolist()
        bounds = list(itertools.accumulate(counts, initial=0))
        return Layer(
            RoutedTokens(
                normal(tokens, dim),
                torch.rand(tokens, top_k, generator=random),
                torch.sort(ids_N, stable=True).indices.to(torch.int32),
                list(itertools.pairwise(bounds)),
            ),
            normal(tokens, dim),
            ExpertWeights(
                normal(experts, hidden, dim, scale=dim**-0.5),
                normal(experts, dim, hidden, scale=hidden**-0.5),
                normal(experts, hidden, dim, scale=dim**-0.5),
            ),
        )

    def inputs(self) -> list[torch.Tensor]:
        """x, scores and weights."""
        return [self.tokens.x_TD, self.tokens.scores_TK, *self.weights.tensors()]

    def step_shape(self) -> StepShape:
        _, hidden, dim = self.weights.w1_gFD.shape
        rows = min(ROWS_PER_STEP, self.tokens.scores_TK.numel())
        return StepShape(rows, dim, hidden, self.dout_TD.dtype, CPU, kernels="torch")


def relay_forward(layer: Layer) -> torch.Tensor:
    out_TD, workspace = torch.zeros_like(layer.tokens.x_TD), forward_workspace(layer.step_shape())
    forward_experts_(out_TD, layer.tokens, layer.weights, SwiGLU(), workspace)
    return out_TD


def relay_backward(layer: Layer) -> list[torch.Tensor]:
    tokens, weights = layer.tokens, layer.weights
    dweights = weights.empty_like(weights.num_experts)
    dx_TD, dscores_TK = torch.zeros_like(tokens.x_TD), torch.zeros_like(tokens.scores_TK)
    workspace = backward_workspace(layer.step_shape(), tokens.x_TD.dtype)
    into = Gradients(dx_TD, dscores_TK, dweights)
    backward_experts_(into, layer.dout_TD, tokens, weights, SwiGLU(), workspace)
    return [dx_TD, dscores_TK, *dweights.tensors()]


def grouped_forward(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    layer: Layer,
) -> torch.Tensor:
    offsets_E = torch.tensor([end for _, end in layer.tokens.segments], dtype=torch.int32)
    row_N = layer.tokens.rows_N.long()
    token_N = row_N // scores_TK.shape[1]
    x_ND = x_TD[token_N]
    gate_NF = torch._grouped_mm(x_ND, w1_EFD.transpose(1, 2), offs=offsets_E)
    up_NF = torch._grouped_mm(x_ND, w3_EFD.transpose(1, 2), offs=offsets_E)
    a_NF = torch.nn.functional.silu(gate_NF) * up_NF
    y_ND = torch._grouped_mm(a_NF, w2_EDF.transpose(1, 2), offs=offsets_E)
    y_ND = (y_ND.float() * scores_TK.flatten()[row_N, None]).to(x_TD.dtype)
    return torch.zeros_like(x_TD).index_add(0, token_N, y_ND)


def grouped_backward(layer: Layer) -> list[torch.Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in layer.inputs()]
    out_TD = grouped_forward(leaves[0], leaves[1], leaves[2], leaves[3], leaves[4], layer)
    return list(torch.autograd.grad(out_TD, leaves, layer.dout_TD))


def check_same(left: list[torch.Tensor], right: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Both sides compute the same: to 1e-4 in float32, to a few roundings in bfloat16."""
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for mine, theirs in zip(left, right, strict=True):
        error = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()
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
    layer = Layer.make(shape, DTYPES[name])
    tensors = layer.inputs()

    def grouped() -> torch.Tensor:
        return grouped_forward(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], layer)

    title = f"| {name} | {' | '.join(str(size) for size in shape)} |"
    try:
        reference = [grouped()]
    except RuntimeError as refusal:
        if "stride" not in str(refusal):
            raise
        if not products:
            return f"{title} | refused | | | | |"
        forward, backward = (
            statistics.median(taken_ms(functools.partial(run, layer)) for _ in range(rounds))
            for run in (relay_forward, relay_backward)
        )
        return f"{title} {forward:.1f} | refused | | {backward:.1f} | refused | |"
    check_same([relay_forward(layer)], reference, layer.dout_TD.dtype)
    if not products:
        with no_products():
            own, other, ratio = paired_ms(lambda: relay_forward(layer), grouped, rounds)
        return f"{title} {own:.2f} | {other:.2f} | {ratio:.2f} | | | |"
    check_same(relay_backward(layer), grouped_backward(layer), layer.dout_TD.dtype)
    pairs = (
        paired_ms(lambda: relay_forward(layer), grouped, rounds),
        paired_ms(lambda: relay_backward(layer), lambda: grouped_backward(layer), rounds),
    )
    columns = [f"{own:.1f} | {other:.1f} | {ratio:.2f}" for own, other, ratio in pairs]
    return f"{title} {' | '.join(columns)} |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
