"""What memory a training process takes: process figures on CPU, the allocator's on a device.

On CPU there is no allocator to ask. Two figures stand in for it: the bytes of live tensors, exact
and repeatable, measured in steps that are logged; and the process's resident set, which has
everything in it, libraries and fragmentation included.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torchtitan.components.metrics import (
    DeviceMemoryMonitor,
    DeviceMemStats,
    build_device_memory_monitor,
)
from torchtitan.tools.logging import logger

from titan_relay.measure import LiveBytes
from titan_relay.measure.storages import Trackable
from titan_relay.titan.device import on_cpu
from titan_relay.units import GIB, in_gib


class CpuMemoryMonitor:
    """Memory of this process, with the interface of torchtitan's `DeviceMemoryMonitor`.

    `get_peak_stats` reports as "active" the live-tensor peak of what was measured since the last
    reset (0 if nothing was), and as "reserved" the peak of the resident set since the process
    started, both also in percent of the memory that this process may use.
    """

    def __init__(self) -> None:
        self.device_name = "CPU"
        self.device_capacity = usable_memory_bytes()
        self.device_capacity_gib = self.device_capacity / GIB
        self._measured_peak_bytes = 0
        self._tracker: LiveBytes | None = None

    @property
    def live_peak_bytes(self) -> int:
        """Live-tensor peak since the last reset, of a measurement that still runs too."""
        running_bytes = 0 if self._tracker is None else self._tracker.peak_bytes
        return max(self._measured_peak_bytes, running_bytes)

    def get_peak_stats(self) -> DeviceMemStats:
        """The figures since the last reset; see the class."""
        rss_peak_bytes = resident_peak_bytes()
        return DeviceMemStats(
            max_active_gib=self.live_peak_bytes / GIB,
            max_active_pct=100 * self.live_peak_bytes / self.device_capacity,
            max_reserved_gib=rss_peak_bytes / GIB,
            max_reserved_pct=100 * rss_peak_bytes / self.device_capacity,
            num_alloc_retries=0,
            num_ooms=0,
        )

    def reset_peak_stats(self) -> None:
        """Forget the live-tensor peak; the resident set's peak belongs to the whole process.

        A measurement that still runs has been reported and counts no more.
        """
        self._measured_peak_bytes = 0
        self._tracker = None

    def curves(self) -> dict[str, float]:
        """Memory curves of this rank. The live peak is there only if a step was measured."""
        rss_bytes = resident_bytes()
        # The system counts the two in different ways, a few pages apart.
        curves = {"memory/rss_peak(GiB)": max(resident_peak_bytes(), rss_bytes or 0) / GIB}
        if rss_bytes is not None:
            curves["memory/rss(GiB)"] = rss_bytes / GIB
        if self.live_peak_bytes:
            curves["memory/live_peak(GiB)"] = self.live_peak_bytes / GIB
        return curves

    @contextmanager
    def measure_live(self, *owners: Trackable) -> Iterator[None]:
        """Measure the live-tensor peak inside, with what `owners` hold already."""
        with LiveBytes() as tracker:
            tracker.include(*owners)
            self._tracker = tracker
            try:
                yield
            finally:
                self._measured_peak_bytes = self.live_peak_bytes
                self._tracker = None


def device_curves(monitor: DeviceMemoryMonitor) -> dict[str, float]:
    """Memory curves of this rank from the device's caching allocator."""
    stats = monitor.get_peak_stats()
    return {
        "memory/live_peak(GiB)": stats.max_active_gib,
        "memory/live_peak(%)": stats.max_active_pct,
        "memory/reserved_peak(GiB)": stats.max_reserved_gib,
        "memory/reserved_peak(%)": stats.max_reserved_pct,
        "memory/num_alloc_retries": float(stats.num_alloc_retries),
        "memory/num_ooms": float(stats.num_ooms),
    }


def build_memory_monitor() -> CpuMemoryMonitor | DeviceMemoryMonitor:
    """The monitor for this process's device."""
    if not on_cpu():
        return build_device_memory_monitor()
    monitor = CpuMemoryMonitor()
    logger.info(f"CPU: this process may use {in_gib(monitor.device_capacity)} of memory")
    return monitor


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocation failed, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def resident_bytes() -> int | None:
    """The process's resident set now; None where the system has no /proc."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_peak_bytes() -> int:
    """The largest resident set since the process started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def usable_memory_bytes() -> int:
    """Physical memory, or the control group's limit if that is lower."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical_bytes
    return min(physical_bytes, int(limit)) if limit.isdigit() else physical_bytes
