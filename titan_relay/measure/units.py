"""Numbers of bytes for people."""

from __future__ import annotations


def unit_for(num_bytes: float) -> tuple[int, str]:
    """GiB, or MiB for what would be nearly zero in GiB; its bytes and its name."""
    return (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")


def in_words(num_bytes: float) -> str:
    """Example: 1.5 * 2**30 is "1.50 GiB", and 1000 is "0.00 MiB"."""
    unit, name = unit_for(num_bytes)
    return f"{num_bytes / unit:.2f} {name}"
