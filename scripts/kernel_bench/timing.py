"""Time of a function on a device, and the two speeds that nothing can beat."""

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

_FLUSH_BYTES = 256 * 2**20  # more than any chip's second-level cache
_COPY_BYTES = 2**30


def kernels_can_run(script: str, interpret: bool) -> bool:
    """Whether there is a GPU, or else Triton's interpreter; says so where there is neither.

    Triton decides at its import whether it compiles, so call this before anything imports it.
    """
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        print(
            f"error: {script} needs a CUDA device, and there is none; "
            "--interpret tries the script out without one",
            file=sys.stderr,
        )
        return False
    return True


class Timer:
    """Median milliseconds over ``iterations``, after ``warmup``, with a cold cache."""

    def __init__(self, device: torch.device, iterations: int, warmup: int) -> None:
        self.device, self.iterations, self.warmup = device, iterations, warmup
        self.on_device = device.type == "cuda"
        flush_bytes = _FLUSH_BYTES if self.on_device else 0
        self._flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def ms(self, function: Callable[[], object]) -> float:
        for _ in range(self.warmup):
            function()
        return statistics.median(
            self._on_device(function) if self.on_device else self._on_host(function)
        )

    def _on_device(self, function: Callable[[], object]) -> list[float]:
        pairs = []
        for _ in range(self.iterations):
            self._flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in pairs]

    def _on_host(self, function: Callable[[], object]) -> list[float]:
        times_ms = []
        for _ in range(self.iterations):
            begin_s = time.perf_counter()
            function()
            times_ms.append(1e3 * (time.perf_counter() - begin_s))
        return times_ms


def copy_bytes_per_s(timer: Timer) -> float:
    """Bytes read and written per second by a large copy."""
    num_bytes = _COPY_BYTES if timer.on_device else 2**22
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / (1e-3 * timer.ms(lambda: target.copy_(source)))


def dense_flops_per_s(
    timer: Timer, dtype: torch.dtype, num_rows: int, sizes: tuple[int, int]
) -> float:
    """Of one dense product with the same number of multiply-adds as a grouped one.

    ``num_rows x sizes[0]`` times ``sizes[0] x sizes[1]``.
    """
    depth, width = sizes
    left = torch.randn(num_rows, depth, device=timer.device, dtype=dtype)
    right = torch.randn(depth, width, device=timer.device, dtype=dtype)
    out = torch.empty(num_rows, width, device=timer.device, dtype=dtype)
    return 2 * num_rows * depth * width / (1e-3 * timer.ms(lambda: torch.mm(left, right, out=out)))
