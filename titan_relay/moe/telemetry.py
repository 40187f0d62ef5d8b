"""What a ring did: bytes sent, messages, seconds waited, per layer and operation.

A ``RingTelemetry`` belongs to one ring (``relay_ring(group).telemetry``). It keeps sums, not a
history, so that its size is bounded by the number of layers.
"""

import operator
import threading
from dataclasses import astuple, dataclass, replace


@dataclass(frozen=True)
class RingCounts:
    """Sums over some calls of one layer's forward or backward on this rank.

    ``num_experts_calls`` are those in which experts circulated, and not tokens.
    ``wait_seconds`` is the time in which this process was blocked on transfers after the compute
    that should have hidden them. Where waiting is queued on the device instead of blocking the
    process (NCCL), it counts the time of queueing only.
    """

    num_calls: int = 0
    num_experts_calls: int = 0
    num_messages: int = 0
    sent_bytes: int = 0
    wait_seconds: float = 0.0

    def __add__(self, other: "RingCounts") -> "RingCounts":
        return RingCounts(*map(operator.add, astuple(self), astuple(other)))


class RingTelemetry:
    """Thread-safe sums by ``(layer, operation)``; autograd runs backwards in threads of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], RingCounts] = {}

    def add(self, layer: str, operation: str, counts: RingCounts, *, experts: bool) -> None:
        """One call's exchanges; ``experts``: these circulated."""
        key, call = (layer, operation), replace(counts, num_calls=1, num_experts_calls=int(experts))
        with self._lock:
            self._counts[key] = self._counts.get(key, RingCounts()) + call

    def counts(self) -> dict[tuple[str, str], RingCounts]:
        """The sums since the last ``take``, by ``(layer, operation)``."""
        with self._lock:
            return dict(self._counts)

    def take(self) -> dict[tuple[str, str], RingCounts]:
        """The sums since the last ``take``; they start again from zero."""
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken
