"""The line that a report prints, and nothing else: text from numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan.tools.utils import Color, NoColor

from titan_relay.titan.metrics.speed import Speed
from titan_relay.units import GIB, duration_in_words, in_gib


@dataclass(frozen=True)
class RunProgress:
    """Where a run is."""

    step: int
    total_steps: int
    seconds_left: float


def train_line(
    progress: RunProgress,
    loss: float,
    grad_norm: float,
    speed: Speed,
    curves: Mapping[str, float],
    color: Color | NoColor,
) -> str:
    """One training report; what `curves` lacks (an auxiliary loss, a peak) is left out."""
    parts = [
        f"{color.red}step: {progress.step}/{progress.total_steps}",
        f"{color.green}loss: {loss:.5f}",
    ]
    if "moe/aux_loss" in curves:
        parts.append(f"aux: {curves['moe/aux_loss']:.4f}")
    if "moe/z_loss" in curves:
        parts.append(f"z: {curves['moe/z_loss']:.4f}")
    parts.append(f"{color.orange}grad_norm: {grad_norm:.4f}")
    learning_rates = [value for tag, value in sorted(curves.items()) if tag.startswith("lr/")]
    if learning_rates:
        parts.append(f"lr: {learning_rates[0]:.3e}")
    parts.append(f"{color.blue}tokens/s: {speed.tokens_per_second:,.0f}")
    if speed.mfu_pct is not None:
        parts.append(f"TFLOP/s: {speed.device_tflops:.1f}  MFU: {speed.mfu_pct:.1f}%")
    parts.append(f"{color.turquoise}memory: {_memory(curves)}")
    parts.append(f"{color.magenta}left: {duration_in_words(progress.seconds_left)}{color.reset}")
    return "  ".join(parts)


def validation_line(
    step: int, total_steps: int, loss: float, seconds: float | None, color: Color | NoColor
) -> str:
    """One validation report; `seconds` is how long it took, if known."""
    took = "" if seconds is None else f"  {color.blue}took: {duration_in_words(seconds)}"
    return (
        f"{color.yellow}validation at step: {step}/{total_steps}  "
        f"{color.green}loss: {loss:.5f}{took}{color.reset}"
    )


def _memory(curves: Mapping[str, float]) -> str:
    """What is tight first: the allocator's reserve on a device, the resident set on CPU."""
    if "memory/reserved_peak(GiB)" in curves:
        reserved = in_gib(curves["memory/reserved_peak(GiB)"] * GIB)
        return f"{reserved} ({curves['memory/reserved_peak(%)']:.0f}%)"
    resident = in_gib(curves.get("memory/rss(GiB)", curves.get("memory/rss_peak(GiB)", 0.0)) * GIB)
    if "memory/live_peak(GiB)" in curves:
        return f"{resident} (tensors {curves['memory/live_peak(GiB)']:.3f})"
    return resident
