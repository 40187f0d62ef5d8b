"""A picture of memory over a training step: areas by owner, the limit as a line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from titan_relay.measure.step_memory import Category, Point
from titan_relay.units import GIB, in_gib

_LEAST_SHARE_WITH_NAME = 0.05  # narrower stretches of the step have no room for theirs


def draw_step(
    curve: Sequence[Point], title: str, file: Path, limit_bytes: int | None = None
) -> None:
    """Draw the events of a step to `file`, in the format that its ending names.

    Raises:
        ValueError: matplotlib knows no such format; the message lists those it knows.
    """
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(10, 4.8), layout="constrained")
    axes = figure.add_subplot(title=title, ylabel="GiB", xlim=(0, len(curve) - 1))
    colors = {name: f"C{index}" for index, name in enumerate(Category)} | {
        Category.OTHER: "lightgrey"
    }
    shown = [name for name in Category if any(point.by_category[name] for point in curve)]
    axes.stackplot(
        range(len(curve)),
        [[point.by_category[name] / GIB for point in curve] for name in shown],
        labels=shown,
        colors=[colors[name] for name in shown],
    )
    if limit_bytes is not None:
        axes.axhline(limit_bytes / GIB, color="black", linestyle="--", label="usable")
    peak_bytes = max(point.live_bytes for point in curve)
    axes.legend(
        title=f"peak {in_gib(peak_bytes)}", reverse=True, loc="upper left", bbox_to_anchor=(1, 1)
    )
    ticks = []
    for name, points in itertools.groupby(enumerate(curve), lambda item: _part(item[1].phase)):
        places = [place for place, _ in points]
        axes.axvline(places[-1], color="grey", linewidth=0.5)
        if len(places) > _LEAST_SHARE_WITH_NAME * len(curve):
            ticks.append(((places[0] + places[-1]) / 2, name))
    axes.set_xticks([place for place, _ in ticks], [name for _, name in ticks])
    figure.savefig(file)


def _part(phase: str) -> str:
    """Forward, loss, backward or optimizer."""
    direction, _, part = phase.partition(" ")
    if part == "loss":
        return "loss"
    return "backward" if direction == "recompute" else direction
