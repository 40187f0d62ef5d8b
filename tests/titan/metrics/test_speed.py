"""Speed and time left, on a clock that the test moves."""

import math

import pytest

from titan_relay.titan.metrics.speed import SpeedMeter, TimeLeft


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_speed_per_device_and_of_all_ranks() -> None:
    clock = Clock()
    meter = SpeedMeter(num_ranks=4, peak_flops=1e12, clock=clock)
    clock.now += 10
    speed = meter.read(global_tokens=8000, num_steps=5, data_seconds=1.0, flops_per_token=10**9)
    assert speed.tokens_per_second == pytest.approx(800)
    assert speed.device_tokens_per_second == pytest.approx(200)
    assert speed.device_tflops == pytest.approx(0.2)
    assert speed.mfu_pct == pytest.approx(20)
    assert speed.seconds_per_step == pytest.approx(2)
    assert speed.curves()["time/data_loading(%)"] == pytest.approx(10)
    assert speed.curves()["throughput/mfu(%)"] == pytest.approx(20)


def test_no_mfu_without_a_known_peak() -> None:
    clock = Clock()
    meter = SpeedMeter(num_ranks=1, peak_flops=None, clock=clock)
    clock.now += 1
    speed = meter.read(global_tokens=1, num_steps=1, data_seconds=0, flops_per_token=1)
    assert speed.mfu_pct is None
    assert not any("mfu" in tag for tag in speed.curves())


def test_skipped_time_does_not_count() -> None:
    clock = Clock()
    meter = SpeedMeter(num_ranks=1, peak_flops=None, clock=clock)
    clock.now += 30
    meter.skip(20)
    speed = meter.read(global_tokens=100, num_steps=1, data_seconds=0, flops_per_token=1)
    assert speed.tokens_per_second == pytest.approx(10)
    meter.restart()
    clock.now += 1
    speed = meter.read(global_tokens=100, num_steps=1, data_seconds=0, flops_per_token=1)
    assert speed.tokens_per_second == pytest.approx(100)


def test_time_left_ignores_a_slow_first_step_once_there_is_another() -> None:
    clock = Clock()
    left = TimeLeft(total_steps=100, clock=clock)
    assert left.seconds(1, first_step_seconds=60.0) == pytest.approx(99 * 60)
    clock.now += 18  # nine steps of two seconds
    assert left.seconds(10, first_step_seconds=math.nan) == pytest.approx(90 * 2)
    clock.now += 180
    assert left.seconds(100, first_step_seconds=math.nan) == 0


def test_time_left_follows_the_latest_pace() -> None:
    clock = Clock()
    left = TimeLeft(total_steps=1000, clock=clock)
    for step in range(1, 101):
        clock.now += 1 if step <= 50 else 3
        seconds = left.seconds(step, first_step_seconds=math.nan)
    assert seconds == pytest.approx(900 * 3)
