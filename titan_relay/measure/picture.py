"""A picture of memory over a training step, as SVG, written without any library."""

from __future__ import annotations

from collections.abc import Sequence

from titan_relay.measure.step_memory import CATEGORIES, Point
from titan_relay.units import GIB, in_gib

_WIDTH, _HEIGHT = 960, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 210, 40, 50
_COLOURS = (
    "#4e79a7",
    "#76b7b2",
    "#59a14f",
    "#9c755f",
    "#edc948",
    "#f28e2b",
    "#ff9da7",
    "#b07aa1",
    "#e15759",
    "#bab0ac",
    "#d7d7d7",
)


def svg_of(curve: Sequence[Point], title: str, limit_bytes: int | None = None) -> str:
    """Stacked areas by category over the events of a step, with the limit as a line."""
    highest = max(max(point.live_bytes for point in curve), limit_bytes or 0, 1)
    top = 1.05 * highest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="14">{_escaped(title)}</text>',
        *_areas(curve, top),
        *_axis(top),
        *_stretches(curve),
        *_legend(curve),
    ]
    if limit_bytes is not None:
        y = _y(limit_bytes, top)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="black" '
            'stroke-dasharray="6 4"/>'
            f'<text x="{_WIDTH - _RIGHT + 6}" y="{y + 4:.1f}">usable</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(index: int, num_points: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * index / max(1, num_points - 1)


def _y(num_bytes: float, top: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - num_bytes / top)


def _areas(curve: Sequence[Point], top: float) -> list[str]:
    below = [0.0] * len(curve)
    parts = []
    for category, colour in enumerate(_COLOURS):
        above = [low + point.by_category[category] for low, point in zip(below, curve, strict=True)]
        if above == below:
            continue
        forth = [f"{_x(i, len(curve)):.1f},{_y(v, top):.1f}" for i, v in enumerate(above)]
        back = [f"{_x(i, len(curve)):.1f},{_y(v, top):.1f}" for i, v in enumerate(below)]
        parts.append(f'<polygon points="{" ".join(forth + back[::-1])}" fill="{colour}"/>')
        below = above
    return parts


def _axis(top: float) -> list[str]:
    step_gib = _round_step(top / GIB / 5)
    parts = [f'<text x="8" y="{_TOP - 6}">GiB</text>']
    value = 0.0
    while value * GIB <= top:
        y = _y(value * GIB, top)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#0002"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
        value = round(value + step_gib, 9)
    return parts


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    step = 1e-6
    while True:
        for factor in (1, 2, 5):
            if step * factor >= rough:
                return step * factor
        step *= 10


def _stretches(curve: Sequence[Point]) -> list[str]:
    """Under the axis: where forward, loss, backward and optimizer are."""
    names = [_stretch_name(point.phase) for point in curve]
    parts, start = [], 0
    for index in range(1, len(names) + 1):
        if index < len(names) and names[index] == names[start]:
            continue
        left, right = _x(start, len(names)), _x(index - 1, len(names))
        if right - left > 40:
            parts.append(
                f'<text x="{(left + right) / 2:.1f}" y="{_HEIGHT - _BOTTOM + 18}" '
                f'text-anchor="middle">{names[start]}</text>'
            )
        if index < len(names):
            parts.append(
                f'<line x1="{right:.1f}" y1="{_TOP}" x2="{right:.1f}" y2="{_HEIGHT - _BOTTOM}" '
                'stroke="#0004"/>'
            )
        start = index
    return parts


def _stretch_name(phase: str) -> str:
    direction, _, part = phase.partition(" ")
    if part == "loss":
        return "loss"
    return "backward" if direction == "recompute" else direction


def _legend(curve: Sequence[Point]) -> list[str]:
    peak = max(curve, key=lambda point: point.live_bytes)
    parts, y = [], _TOP + 10
    for category, name in reversed(list(enumerate(CATEGORIES))):
        if not any(point.by_category[category] for point in curve):
            continue
        parts.append(
            f'<rect x="{_WIDTH - _RIGHT + 62}" y="{y - 10}" width="12" height="12" '
            f'fill="{_COLOURS[category]}"/><text x="{_WIDTH - _RIGHT + 80}" y="{y}">{name}</text>'
        )
        y += 20
    parts.append(
        f'<text x="{_WIDTH - _RIGHT + 62}" y="{y + 8}">peak {in_gib(peak.live_bytes)}</text>'
    )
    return parts


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
