"""The lines of a benchmark's table."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One measurement; a share is of 1, and 0 where it has no meaning.

    ``ceiling_share``: of the dense product's speed. ``copy_share``: of a copy's, when the least
    possible bytes are counted. ``speedup``: how many times as fast as the unfused form.
    """

    name: str
    ms: float = 0.0
    tflops_per_s: float = 0.0
    ceiling_share: float = 0.0
    least_gb: float = 0.0
    copy_share: float = 0.0
    speedup: float = 0.0
    error: float = 0.0


_HEADER = (
    "| | ms | TFLOP/s | of the ceiling | least GB | of copy speed | against unfused | error |\n"
    "|---|---|---|---|---|---|---|---|"
)


def table(rows: Sequence[Row]) -> str:
    return "\n".join([_HEADER, *(_line(row) for row in rows)])


def _line(row: Row) -> str:
    cells = [
        row.name,
        f"{row.ms:.3f}" if row.ms else "",
        f"{row.tflops_per_s:.1f}" if row.tflops_per_s else "",
        f"{row.ceiling_share:.1%}" if row.ceiling_share else "",
        f"{row.least_gb:.3f}" if row.least_gb else "",
        f"{row.copy_share:.1%}" if row.copy_share else "",
        f"{row.speedup:.2f}x" if row.speedup else "",
        f"{row.error:.1e}" if row.error else "",
    ]
    return f"| {' | '.join(cells)} |"
