"""Memory, time, error and traffic of one MoE layer, forward and backward, by implementation.

    python scripts/bench_layer.py --ep 2 --tokens 4096 --dim 256 --expert-dim 128 --experts 32 \
        --top-k 8 --impl relay-auto torchtitan megatron --json out.json

Spawns its own ranks, one thread each on CPU (gloo), or one GPU each (NCCL). All implementations
run in one process per rank, take turns, and are checked against one float64 reference. Each figure
is that of the largest rank; times are medians over iterations.

``megatron`` on CPU is Megatron-Core with sequential experts, eager, without Transformer Engine;
read nothing about GPUs from it. ``megatron-grouped`` has grouped experts instead.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from layer_bench.layers import IMPLEMENTATIONS, build_layer
from layer_bench.measure import (
    expected_of,
    measure_error,
    measure_memory,
    measure_times,
    measure_traffic,
)
from layer_bench.setting import Setting, add_layer_options, parse_layer
from report_tables import markdown_table
from titan_relay.commands.arguments import at_least_1, file_to_write, script_parser, write_json
from titan_relay.local_ranks import on_ranks
from titan_relay.moe import RelayOptions
from titan_relay.units import MIB, in_mib


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    results = on_ranks(measure, args, world_size=args.ep, device=args.device)
    print(table(Setting.of(args, args.ep), results))
    if args.json:
        write_json(args.json, results)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--impl", nargs="+", choices=IMPLEMENTATIONS, default=["relay-auto"], metavar="NAME",
        help=f"any of {', '.join(IMPLEMENTATIONS)}",
    )  # fmt: skip
    parser.add_argument("--ep", type=at_least_1, default=2, help="expert-parallel ranks")
    add_layer_options(parser)
    parser.set_defaults(tokens=4096, dim=256, expert_dim=128, experts=32, top_k=8, skew=0.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--iters", type=at_least_1, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument(
        "--json", type=file_to_write, metavar="FILE", help="write a list of objects, one per NAME"
    )
    args = parse_layer(parser, argv)
    fault = fault_of(args)
    if fault:
        parser.error(fault)
    args.device = args.device or ("cuda" if torch.cuda.device_count() >= args.ep else "cpu")
    return args


def fault_of(args: argparse.Namespace) -> str:
    """What is wrong with the arguments, before a rank is started; empty for nothing."""
    if min(args.dim, args.expert_dim) < 1:
        return f"--scale {args.scale} leaves nothing of --preset {args.preset}"
    if args.warmup < 0:
        return f"--warmup {args.warmup} must be at least 0"
    if args.scale != 1.0 and not args.preset:
        return f"--scale {args.scale} shrinks a --preset, and there is none"
    if len(set(args.impl)) < len(args.impl):
        return f"--impl {' '.join(args.impl)} names one twice"
    if args.experts % args.ep:
        return f"--experts {args.experts} must be divisible by --ep {args.ep}"
    if args.device == "cuda" and torch.cuda.device_count() < args.ep:
        return f"--device cuda: --ep {args.ep} needs as many GPUs; {torch.cuda.device_count()} here"
    return ""


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every figure of every implementation, on the largest rank."""
    setting = Setting.of(args, args.ep)
    group = dist.distributed_c10d._get_default_group()
    inputs = setting.inputs(dist.get_rank())
    options = RelayOptions(
        num_slices=args.num_slices or "auto", max_rows_per_step=args.rows_per_step or "auto"
    )
    layers = [build_layer(name, setting, group, options) for name in args.impl]
    expected = expected_of(setting, inputs, group)
    errors = {layer.name: measure_error(layer, inputs, expected) for layer in layers}
    del expected
    figures: list[dict[str, Any]] = []
    for layer in layers:
        traffic = measure_traffic(layer, inputs)
        figures.append({**measure_memory(layer, inputs), **traffic})
    times = measure_times(layers, inputs, args.iters, args.warmup)
    results = []
    for layer, figure in zip(layers, figures, strict=True):
        figure |= {"max_rel_err": errors[layer.name]}
        figure = {name: _largest(value) for name, value in figure.items()}
        every_ms = [_largest(value) for value in times[layer.name]]
        median_ms = statistics.median(every_ms) if every_ms else float("nan")
        measured = {**figure, "median_ms": median_ms, "all_ms": every_ms}
        results.append({"impl": layer.name, **measured, **described(setting)})
    return results


def described(setting: Setting) -> dict[str, Any]:
    """The setting, as it goes into each result."""
    values = {**dataclasses.asdict(setting), "dtype": str(setting.dtype).removeprefix("torch.")}
    return {**values, "unit_bytes": setting.unit_bytes}


def _largest(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    if torch.cuda.is_available() and dist.get_backend() == "nccl":
        tensor = tensor.cuda()
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def table(setting: Setting, results: list[dict[str, Any]]) -> str:
    """Memory in units of one copy of a rank's tokens."""
    unit = setting.unit_bytes
    header = (
        "implementation",
        "peak units",
        "saved units",
        "median ms",
        "sent MiB",
        "wait ms",
        "error",
    )
    rows = [
        (
            result["impl"],
            f"{result['peak_bytes'] / unit:.2f}",
            f"{result['saved_bytes'] / unit:.3f}",
            f"{result['median_ms']:.1f}",
            f"{result['sent_bytes'] / MIB:.1f}",
            f"{result['wait_ms']:.1f}",
            f"{result['max_rel_err']:.1e}",
        )
        for result in results
    ]
    units = f"1 unit = T*D*{setting.dtype.itemsize} bytes = {in_mib(unit)}"
    return f"W={setting.ep} {setting}; {units}\n\n{markdown_table(header, rows)}"


if __name__ == "__main__":
    main()
