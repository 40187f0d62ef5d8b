"""The lines of a benchmark's table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from report_tables import markdown_table


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


# By field of a row: its column, and how it is shown.
_COLUMNS = {
    "ms": ("ms", "{:.3f}"),
    "tflops_per_s": ("TFLOP/s", "{:.1f}"),
    "ceiling_share": ("of the ceiling", "{:.1%}"),
    "least_gb": ("least GB", "{:.3f}"),
    "copy_share": ("of copy speed", "{:.1%}"),
    "speedup": ("against unfused", "{:.2f}x"),
    "error": ("error", "{:.1e}"),
}


def table(rows: Sequence[Row]) -> str:
    titles = [title for title, _ in _COLUMNS.values()]
    return markdown_table(["", *titles], [(row.name, *_numbers(row)) for row in rows])


def _numbers(row: Row) -> Iterator[str]:
    for field, (_, shown) in _COLUMNS.items():
        value = getattr(row, field)
        yield shown.format(value) if value else ""
