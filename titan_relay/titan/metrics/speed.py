"""Speed: tokens and FLOPs per second, the device's peak, and the time that is left.

FLOPs per token count *active* parameters (torchtitan's `get_moe_model_nparams_and_flops`): of the
routed experts only top_k / num_experts, shared experts once, the router whole, forward and backward
without recomputation, plus attention's 6 * layers * heads * (q and v head dims) * sequence length.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.tools.utils import get_peak_flops

# What torchtitan answers for a device that it does not know.
_FALLBACK_FLOPS = 312e12
_FALLBACK_DEVICE = "A100"
# Time left is judged by the last so many reports.
_NUM_REPORTS = 20


def known_peak_flops(
    device_name: str, on_cpu: bool, look_up: Callable[[str], float] = get_peak_flops
) -> float | None:
    """Dense bfloat16 FLOP/s of a device; None on CPU and for a device that is not known.

    torchtitan's `look_up` assumes an A100 for what it does not know: a made-up MFU.
    """
    if on_cpu:
        return None
    peak_flops = look_up(device_name)
    if peak_flops == _FALLBACK_FLOPS and _FALLBACK_DEVICE not in device_name:
        return None
    return peak_flops


@dataclass(frozen=True)
class Speed:
    """Speed over some steps.

    tokens_per_second: of all ranks together. device_tokens_per_second: divided by the number of
    ranks. device_tflops: model TFLOP/s per device. mfu_pct: percent of the peak; None if unknown.
    seconds_per_step: mean. data_seconds_per_step: of it, waiting for data.
    """

    tokens_per_second: float
    device_tokens_per_second: float
    device_tflops: float
    mfu_pct: float | None
    seconds_per_step: float
    data_seconds_per_step: float

    def curves(self) -> dict[str, float]:
        """The curves of this speed."""
        curves = {
            "throughput/tokens_per_second": self.tokens_per_second,
            "throughput/device_tokens_per_second": self.device_tokens_per_second,
            "throughput/device_tflops": self.device_tflops,
            "time/step(s)": self.seconds_per_step,
            "time/data_loading(s)": self.data_seconds_per_step,
            "time/data_loading(%)": 100 * self.data_seconds_per_step / self.seconds_per_step,
        }
        if self.mfu_pct is not None:
            curves["throughput/mfu(%)"] = self.mfu_pct
        return curves


class SpeedMeter:
    """Speed of training since the last report, without the time that validation took."""

    def __init__(
        self,
        num_ranks: int,
        peak_flops: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_ranks = num_ranks
        self._peak_flops = peak_flops
        self._clock = clock
        self._since = clock()

    def restart(self) -> None:
        """Begin to measure now."""
        self._since = self._clock()

    def skip(self, seconds: float) -> None:
        """Leave out time that was spent on something other than training."""
        self._since += seconds

    def read(
        self,
        *,
        global_tokens: float,
        num_steps: int,
        data_seconds: float,
        flops_per_token: int,
        until: float | None = None,
    ) -> Speed:
        """The speed since the last restart, for so many tokens of all ranks in so many steps.

        `until`: the interval ended then; None: it ends now.
        """
        seconds = max((self._clock() if until is None else until) - self._since, 1e-9)
        device_rate = global_tokens / seconds / self._num_ranks
        device_flops = flops_per_token * device_rate
        return Speed(
            tokens_per_second=global_tokens / seconds,
            device_tokens_per_second=device_rate,
            device_tflops=device_flops / 1e12,
            mfu_pct=None if self._peak_flops is None else 100 * device_flops / self._peak_flops,
            seconds_per_step=seconds / num_steps,
            data_seconds_per_step=data_seconds / num_steps,
        )


class TimeLeft:
    """Time to the last step at the pace of the latest reports, whatever was done between them.

    The first step of a process (start-up, compilation) counts only until there is a second report.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._total_steps = total_steps
        self._clock = clock
        self._reports: deque[tuple[int, float]] = deque(maxlen=_NUM_REPORTS)

    def seconds(self, step: int, first_step_seconds: float) -> float:
        """Report that `step` is done; `first_step_seconds` serves when nothing else is known."""
        self._reports.append((step, self._clock()))
        (old_step, old_time), (_, now) = self._reports[0], self._reports[-1]
        pace = (now - old_time) / (step - old_step) if step > old_step else first_step_seconds
        return max(0, self._total_steps - step) * pace
