"""Bytes and durations in words: the one place that knows how MiB, GiB and hours are written.

Plain Python, at the bottom of the tree.
"""

from __future__ import annotations

MIB = 2**20
GIB = 2**30


def unit_for(num_bytes: float) -> tuple[int, str]:
    """GiB, or MiB for what would be nearly zero in GiB; its bytes and its name."""
    return (GIB, "GiB") if num_bytes >= GIB else (MIB, "MiB")


def in_words(num_bytes: float) -> str:
    """In the unit that suits: 1.5 * 2**30 is "1.50 GiB", and 1000 is "0.00 MiB"."""
    unit, name = unit_for(num_bytes)
    return f"{num_bytes / unit:.2f} {name}"


def in_mib(num_bytes: float, decimals: int = 2) -> str:
    """Always in MiB, for numbers to compare: 2**19 is "0.50 MiB"."""
    return f"{num_bytes / MIB:.{decimals}f} MiB"


def in_gib(num_bytes: float, decimals: int = 2) -> str:
    """Always in GiB: 2**29 is "0.50 GiB"."""
    return f"{num_bytes / GIB:.{decimals}f} GiB"


def in_mb(num_bytes: float) -> str:
    """Decimal, as files are counted: 1.5 * 10**6 is "1.50 MB"."""
    return f"{num_bytes / 1e6:.2f} MB"


def in_gb(num_bytes: float) -> str:
    """Decimal, as disks are counted: 1.5 * 10**9 is "1.5 GB"."""
    return f"{num_bytes / 1e9:.1f} GB"


def duration_in_words(seconds: float) -> str:
    """A duration in its two largest units: "2d 03h", "1h 05m", "4m 09s", "12s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    if minutes:
        return f"{minutes}m {rest:02d}s"
    return f"{rest}s"
