"""The tables of docs/benchmarks.md: many runs of `scripts/bench_layer.py`, one after another.

    python scripts/bench_grid.py time ranks skew presets

Each run's results are kept as JSON in the output folder, and a set whose file is there is not run
again. The tables go to standard output as Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report_tables import markdown_table
from titan_relay.commands.arguments import script_parser

ROOT = Path(__file__).resolve().parent.parent
RELAY = ["relay-auto", "relay-weighed", "relay-experts"]
BASELINES = ["torchtitan", "torchtitan-recompute", "megatron", "megatron-recompute"]
PRESETS = {
    "qwen3-30b-a3b": 0.125,
    "mixtral-8x7b": 0.0625,
    "qwen2-57b-a14b": 0.0625,
    "phi-3.5-moe": 0.0625,
}

Run = tuple[str, list[str]]  # name of the run and its arguments for bench_layer.py
Results = list[dict[str, Any]]


def _shape(ep: int, expert_dim: int, top_k: int, skew: float) -> Run:
    name = f"W{ep}_F{expert_dim}_K{top_k}_skew{skew:g}"
    arguments = ["--ep", str(ep), "--expert-dim", str(expert_dim), "--top-k", str(top_k)]
    return name, [*arguments, "--skew", str(skew)]


def _preset(name: str, scale: float) -> Run:
    arguments = ["--preset", name, "--scale", str(scale), "--ep", "2", "--tokens", "2048"]
    return f"preset_{name}", arguments


SETS: dict[str, tuple[list[Run], list[str]]] = {
    "time": (
        [_shape(2, f, k, s) for f in (128, 512) for k in (2, 4, 8) for s in (0.0, 2.0)],
        RELAY + BASELINES + ["megatron-grouped"],
    ),
    "ranks": (
        [_shape(4, f, 8, s) for f in (128, 512) for s in (0.0, 2.0)],
        RELAY + BASELINES + ["torchtitan-stock"],
    ),
    "skew": (
        [_shape(2, 128, k, s) for k in (2, 8) for s in (0.0, 1.0, 2.0, 50.0)],  # 50: one expert
        [*RELAY, "torchtitan", "megatron"],
    ),
    "presets": (
        [_preset(name, scale) for name, scale in PRESETS.items()],
        RELAY + BASELINES,
    ),
}


def main() -> int:
    """Run the sets named on the command line; print their tables."""
    parser = script_parser(__doc__)
    parser.add_argument("sets", nargs="+", choices=SETS)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench")
    parser.add_argument("--iters", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = [(name, run, SETS[name][1]) for name in args.sets for run in SETS[name][0]]
    results: dict[str, list[Results]] = {name: [] for name in args.sets}
    start = time.monotonic()
    for number, (name, (run, arguments), impls) in enumerate(runs):
        left = (time.monotonic() - start) / max(1, number) * (len(runs) - number)
        eta = f", about {left / 60:.0f} min left" if number else ""
        print(f"[{number + 1}/{len(runs)}{eta}] {run}", file=sys.stderr)
        results[name].append(_measured(args.out / f"{name}_{run}.json", arguments, impls, args))
    for name in args.sets:
        print(f"\n### {name}\n\n{_table(results[name])}\n\n{_speedups(results[name])}")
    return 0


def _measured(
    path: Path, arguments: list[str], impls: list[str], args: argparse.Namespace
) -> Results:
    if not path.exists():
        command = [sys.executable, str(ROOT / "scripts" / "bench_layer.py"), *arguments]
        command += ["--impl", *impls, "--iters", str(args.iters), "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    results: Results = json.loads(path.read_text())
    return results


def _table(settings: list[Results]) -> str:
    """A row per setting, a column per implementation: ms, then peak and saved in token copies."""
    header = ["W", "T", "D", "F", "E", "K", "skew", *(result["impl"] for result in settings[0])]
    keys = ("ep", "tokens", "dim", "expert_dim", "experts", "top_k", "skew")
    rows = [
        [f"{results[0][key]:g}" for key in keys] + [_cell(result) for result in results]
        for results in settings
    ]
    return markdown_table(header, rows)


def _cell(result: dict[str, Any]) -> str:
    peak, saved = (result[key] / result["unit_bytes"] for key in ("peak_bytes", "saved_bytes"))
    return f"{result['median_ms']:.0f} ms, {peak:.2f} / {saved:.2f}"


def _speedups(settings: list[Results]) -> str:
    """Geometric means over the settings of how much faster the relay is than each baseline."""
    by_name = [{result["impl"]: result["median_ms"] for result in each} for each in settings]
    relays = [name for name in RELAY if name in by_name[0]]
    others = [name for name in by_name[0] if name not in relays]
    rows = []
    for other in others:
        means = [
            statistics.geometric_mean(each[other] / each[relay] for each in by_name)
            for relay in relays
        ]
        rows.append([other, *(f"{mean:.2f}x" for mean in means)])
    return markdown_table(["faster than", *relays], rows)


if __name__ == "__main__":
    sys.exit(main())
