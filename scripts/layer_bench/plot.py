"""Plot results of ``scripts/bench_layer.py``: memory and time against top-k or skew.

python scripts/layer_bench/plot.py --x top_k --out top_k.png k2.json k4.json k8.json
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

PANELS = {
    "peak_bytes": ("peak, copies of the tokens", True),
    "saved_bytes": ("saved for backward, copies of the tokens", True),
    "median_ms": ("forward and backward, ms", False),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", help="written by bench_layer.py --json")
    parser.add_argument("--x", choices=["top_k", "skew", "expert_dim", "ep"], default="top_k")
    parser.add_argument("--out", required=True, help="image file")
    args = parser.parse_args(argv)
    results = [result for name in args.files for result in json.loads(Path(name).read_text())]
    draw(results, args.x, args.out)


def draw(results: list[dict[str, Any]], x: str, out: str) -> None:
    """One panel per quantity, one line per implementation."""
    from matplotlib.figure import Figure

    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in sorted(results, key=lambda result: result[x]):
        by_name[result["impl"]].append(result)
    figure = Figure(figsize=(5 * len(PANELS), 4), layout="tight")
    axes = figure.subplots(1, len(PANELS))
    for axis, (quantity, (title, in_units)) in zip(axes, PANELS.items(), strict=True):
        for name, points in by_name.items():
            values = [
                point[quantity] / (point["unit_bytes"] if in_units else 1.0) for point in points
            ]
            axis.plot([point[x] for point in points], values, marker="o", label=name)
        axis.set(xlabel=x, title=title, ylim=(0, None))
    axes[0].legend()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
