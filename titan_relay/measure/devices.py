"""Devices that a run can be planned for, and the memory each has.

Capacities are what the driver reports for the whole device, in MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from titan_relay.units import GIB, MIB

_CAPACITY_MIB = {
    "a100-40g": 40960,
    "a100-80g": 81920,
    "h100-80g": 81559,
    "h200-141g": 143771,
    "b200-192g": 183359,
}
CPU = "cpu"
_NAMES = ", ".join((*_CAPACITY_MIB, CPU))

# What live tensors cannot have of a device: the driver's context, communication buffers, library
# workspaces, and what an allocator loses between blocks.
_MOST_GIB = 2**30  # of a device; more is a slip
RESERVED_SHARE = 0.08


@dataclass(frozen=True)
class Device:
    """Where a run is to take place. capacity_bytes: None where nothing limits it (a CPU)."""

    name: str
    capacity_bytes: int | None

    @property
    def is_cpu(self) -> bool:
        """Whether the run computes as it does on CPU: in float32, in small steps."""
        return self.capacity_bytes is None

    @property
    def usable_bytes(self) -> int | None:
        """What live tensors may have of it; None where nothing limits them."""
        if self.capacity_bytes is None:
            return None
        return int(self.capacity_bytes * (1 - RESERVED_SHARE))


def device_named(name: str) -> Device:
    """A known device; or a GPU of so many GiB, such as "48" or "48.5".

    Raises:
        ValueError: neither a name nor a positive number.
    """
    lower = name.lower()
    if lower == CPU:
        return Device(CPU, None)
    if lower in _CAPACITY_MIB:
        return Device(lower, _CAPACITY_MIB[lower] * MIB)
    try:
        num_gib = float(name)
    except ValueError:
        num_gib = 0.0
    if not 0 < num_gib < _MOST_GIB:
        close = get_close_matches(lower, [*_CAPACITY_MIB, CPU], n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"unknown device {name!r}; {guess}name one of {_NAMES}, or its GiB as a number"
        )
    return Device(f"{name} GiB", int(num_gib * GIB))
