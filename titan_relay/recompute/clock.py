"""How long retained calls of each kind take, for a decision about which are worth keeping."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CallClock:
    """Adds up the time of calls by kind: of the host on CPU, of the stream on CUDA."""

    def __init__(self) -> None:
        self._on_device = torch.cuda.is_available()
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.num_calls: dict[str, int] = {}

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Time what runs inside as one call of `kind`."""
        self.num_calls[kind] = self.num_calls.get(kind, 0) + 1
        if self._on_device:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((kind, start, end))
            return
        started = time.perf_counter()
        yield
        self._add(kind, time.perf_counter() - started)

    def seconds(self) -> dict[str, float]:
        """Time by kind since the last `reset`; waits for the device."""
        for kind, start, end in self._events:
            end.synchronize()
            self._add(kind, start.elapsed_time(end) / 1000)
        self._events.clear()
        return dict(self._seconds)

    def reset(self) -> None:
        """Forget everything so far, such as a first step's compilation."""
        self._events.clear()
        self._seconds.clear()
        self.num_calls.clear()

    def _add(self, kind: str, seconds: float) -> None:
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds
