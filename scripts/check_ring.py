"""The whole relay layer on one device: W virtual ranks in one process, checked and measured.

    python scripts/check_ring.py --ranks 2 4 --tokens 16384 --preset qwen3-30b-a3b --scale 0.5

Runs both rings, forward and backward, over a loop-back ring (on a GPU with its streams and buffers;
no second GPU needed). Checks every result against a float64 reference, and three counts of the
bytes that the call works with against each other: the documented formula, live tensors, and, on a
GPU, the peak of the CUDA allocator. Exit code 1 if one of them is off.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from layer_bench.setting import DTYPES, Setting, add_layer_options, parse_layer
from layer_check.dense_truth import Expected, Tensors, expected_results, relative_error
from layer_check.loopback import LoopbackWorld
from relay_kernels import (
    KERNELS,
    ExpertWeights,
    KernelChoiceError,
    SwiGLU,
    uses_triton,
)
from report_tables import markdown_table
from titan_relay.commands.arguments import at_least_1, script_parser
from titan_relay.measure import LiveBytes
from titan_relay.moe import RelayOptions, backward_memory, backward_traffic, forward_memory
from titan_relay.moe.call import RelayCall, Wants, layer_shape
from titan_relay.moe.layer import layer_backward, layer_forward
from titan_relay.moe.ring import Ring
from titan_relay.moe.routing import routed_tokens, sort_rows
from titan_relay.moe.shapes import token_slices
from titan_relay.units import MIB

RINGS: list[Literal["experts", "tokens"]] = ["experts", "tokens"]
HEADER = "ranks", "ring", "largest error", "formula MiB", "live MiB", "allocator MiB", "ms"
# Largest error over largest value. Float32 adds up hundreds of products in another order than the
# reference; in the narrow dtypes a result is itself rounded to 8 or 11 bits, after sums of up to
# top_k + W rounded parts.
ERROR_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# What the formula leaves out: a rank's counts and bounds per expert, and scalars.
FORMULA_LIMIT, FORMULA_LIMIT_BYTES = 0.02, 2048
ALLOCATOR_LIMIT = 0.05  # blocks are rounded up to 512 bytes, large ones left with up to 1 MiB


@dataclass(frozen=True)
class Bytes:
    """Peaks of all ranks together, forward and backward: ``allocator`` is 0 without a GPU."""

    formula: int
    live: int
    allocator: int


class Layer:
    """One setting's inputs on every virtual rank."""

    def __init__(self, setting: Setting, options: RelayOptions) -> None:
        self.setting, self.options = setting, options
        self.device = torch.device(setting.device)
        self.world = LoopbackWorld(setting.ep, self.device)
        self.inputs = [setting.inputs(rank) for rank in range(setting.ep)]
        self.weights = [ExpertWeights(*setting.weights(rank)) for rank in range(setting.ep)]

    def call(self, rank: int, ring: Ring | None, operation: str) -> RelayCall:
        x_TD, scores_TK = self.inputs[rank].x_TD, self.inputs[rank].scores_TK
        shape = layer_shape(x_TD, scores_TK, self.weights[rank], self.setting.ep, self.options)
        return RelayCall(shape, self.options, SwiGLU(), ring, operation)

    def run(self, tracker: LiveBytes | None = None) -> list[Tensors]:
        """Forward and backward on every rank: the output, and all gradients."""

        def on_rank(rank: int, ring: Ring | None) -> Tensors:
            with _counting(tracker):
                return self._on_rank(rank, ring)

        return self.world.run(on_rank)

    def _on_rank(self, rank: int, ring: Ring | None) -> Tensors:
        inputs, weights = self.inputs[rank], self.weights[rank]
        forward = self.call(rank, ring, "forward")
        slices = token_slices(forward.shape.num_tokens, self.setting.ep, self.options)
        rows_N, counts = sort_rows(
            inputs.ids_TK, self.setting.experts, slices, self.options.kernels
        )
        tokens = routed_tokens(inputs.x_TD, inputs.scores_TK, rows_N, counts, self.setting.experts)
        args = (tokens, counts, weights)
        out_TD = layer_forward(forward, *args)
        backward = self.call(rank, ring, "backward")
        wants = Wants(True, True, True)
        gradients = layer_backward(backward, wants, inputs.dout_TD, *args)
        assert gradients.dx_TD is not None
        assert gradients.dscores_TK is not None
        assert gradients.weights is not None
        return [out_TD, gradients.dx_TD, gradients.dscores_TK, *gradients.weights.tensors()]

    def measure(self, expected: Expected) -> tuple[dict[str, float], Bytes]:
        """One run: the largest error over ranks by result, and the bytes of everything made."""
        before, allocator = 0, 0
        if self.device.type == "cuda":
            self.run()  # kernels compiled, and libraries' workspaces allocated
            gc.collect()
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        gc.collect()
        with LiveBytes(self.device.type) as tracker:
            results = self.run(tracker)
        if self.device.type == "cuda":
            allocator = torch.cuda.max_memory_allocated(self.device) - before
        counted = Bytes(self.formula_bytes(), tracker.peak_bytes, allocator)
        return _errors(results, expected), counted

    def formula_bytes(self) -> int:
        """By ``titan_relay.moe.memory``, for all ranks together.

        The peak is the backward's, when the forward's result and weight gradients are alive too.
        Where those are summed in a wider dtype in a ring of tokens, they come into being at the
        very end, when a rank is about to give up more; so for one rank at a time.
        """
        call, num_ranks = self.call(0, None, "backward"), self.setting.ep
        shape, options = call.shape, self.options
        forward_bytes = forward_memory(shape, options, self.device).total_bytes
        backward_bytes = backward_memory(shape, options, self.device).total_bytes
        out_bytes = shape.num_tokens * shape.dim * shape.dtype.itemsize
        dweights_bytes = sum(tensor.nbytes for tensor in self.weights[0].tensors())
        converts = backward_traffic(shape, options).circulate == "tokens"
        converts &= options.sum_dtype(shape.dtype) != shape.dtype
        at_once = 1 if converts else num_ranks
        peak_bytes = num_ranks * (backward_bytes + out_bytes) + at_once * dweights_bytes
        return max(peak_bytes, num_ranks * forward_bytes)

    def median_ms(self, iterations: int) -> float | None:
        times_ms = []
        for _ in range(iterations):
            begin_s = time.perf_counter()
            self.run()  # waits for the device
            times_ms.append(1e3 * (time.perf_counter() - begin_s))
        return statistics.median(times_ms) if times_ms else None


def _errors(results: Sequence[Tensors], expected: Expected) -> dict[str, float]:
    """The largest over ranks, by result."""
    names = ("out", "dx", "dscores", "dw1", "dw2", "dw3")
    worst = dict.fromkeys(names, 0.0)
    for rank, result in enumerate(results):
        truths = expected.of_rank(rank, len(results))
        for name, mine, truth in zip(names, result, truths, strict=True):
            worst[name] = max(worst[name], relative_error(mine, truth))
    return worst


@contextmanager
def _counting(tracker: LiveBytes | None) -> Iterator[None]:
    """Let this thread's tensors count too: a dispatch mode is its thread's own."""
    if tracker is None:
        yield
        return
    torch._C._push_on_torch_dispatch_stack(tracker)
    try:
        yield
    finally:
        torch._C._pop_torch_dispatch_stack(None)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rows, faults = [], []
    for ranks in args.ranks:
        setting = Setting.of(args, ranks)
        expected: Expected | None = None
        rings: list[Literal["experts", "tokens"]] = args.circulate if ranks > 1 else ["experts"]
        for circulate in rings:
            options = RelayOptions(
                circulate=circulate,
                num_slices=args.num_slices or "auto",
                max_rows_per_step=args.rows_per_step or "auto",
                kernels=args.kernels,
                deterministic=args.deterministic,
            )
            layer = Layer(setting, options)
            expected = expected or expected_results(setting.dense_layer(), layer.inputs)
            errors, counted = layer.measure(expected)
            rows.append(_cells(ranks, circulate, errors, counted, layer.median_ms(args.iters)))
            where = f"ring of {circulate}, {ranks} ranks"
            faults += [f"error: {where}: {each}" for each in judge(setting, errors, counted)]
            del layer
    print(
        f"{Setting.of(args, args.ranks[0])}; bytes of all ranks together, ms of all ranks' forward "
        f"and backward on one device\n\n{markdown_table(HEADER, rows)}"
    )
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def judge(setting: Setting, errors: dict[str, float], counted: Bytes) -> list[str]:
    """What is off, one line each."""
    limit = ERROR_LIMITS[setting.dtype]
    found = [
        f"{name} differs from the reference by {error:.1e} of its largest value, more than {limit}"
        for name, error in errors.items()
        if not error <= limit  # a NaN is no number at most the limit
    ]
    limit_bytes = FORMULA_LIMIT * counted.formula + FORMULA_LIMIT_BYTES * setting.ep
    if abs(counted.live - counted.formula) > limit_bytes:
        found.append(f"{counted.live} live bytes, {counted.formula} by the formula")
    if counted.allocator and abs(counted.allocator / counted.live - 1) > ALLOCATOR_LIMIT:
        found.append(f"{counted.allocator} bytes at the allocator's peak, {counted.live} live")
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--ranks", type=at_least_1, nargs="+", default=[2], help="virtual ranks")
    parser.add_argument("--circulate", nargs="+", choices=RINGS, default=RINGS, help="which rings")
    add_layer_options(parser)
    parser.set_defaults(tokens=512, dim=64, expert_dim=48, experts=8, top_k=2, skew=1.0)
    parser.add_argument("--kernels", choices=KERNELS, default="auto", help="see RelayOptions")
    parser.add_argument("--deterministic", action="store_true", help="sums in a fixed order")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--iters", type=int, default=3, help="timed; 0 times nothing")
    args = parse_layer(parser, argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device; use --device cpu")
    try:
        uses_triton(args.kernels, torch.device(args.device), DTYPES[args.dtype])
    except KernelChoiceError as error:
        parser.error(str(error))
    for ranks in args.ranks:
        if ranks < 1 or args.experts % ranks:
            parser.error(f"--experts {args.experts} must be divisible by --ranks {ranks}")
    return args


def _cells(
    ranks: int, ring: str, errors: dict[str, float], counted: Bytes, ms: float | None
) -> tuple[object, ...]:
    name = max(errors, key=lambda each: errors[each])
    return (
        ranks,
        ring,
        f"{errors[name]:.1e} ({name})",
        f"{counted.formula / MIB:.2f}",
        f"{counted.live / MIB:.2f}",
        f"{counted.allocator / MIB:.2f}" if counted.allocator else "-",
        "-" if ms is None else f"{ms:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
