"""The metrics processor in one process: what it prints, which curves it writes, when, and what of.

torchtitan's mesh object is stood in for by the few numbers that the processor reads of it.
"""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torchtitan.tools.logging import logger as titan_logger

from titan_relay.titan.metrics.folder_lock import FolderError
from titan_relay.titan.metrics.memory import CpuMemoryMonitor
from titan_relay.titan.metrics.processor import RelayMetricsProcessor

DIM = 32


class Optimizers(list):
    """The one attribute of torchtitan's container that is read."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self)


def build(
    folder: Path, clock: Callable[[], float] = time.perf_counter, **config
) -> RelayMetricsProcessor:
    defaults = {
        "log_freq": 1,
        "enable_tensorboard": True,
        "disable_color_printing": True,
        "total_steps": 10,
    }
    dims = SimpleNamespace(world_size=4, non_data_parallel_size=2, pp_enabled=False)
    processor = RelayMetricsProcessor.Config(**{**defaults, **config}).build(
        parallel_dims=dims, dump_folder=str(folder), clock=clock
    )
    processor.num_flops_per_token = 1000
    return processor


def run_steps(
    processor: RelayMetricsProcessor, steps: range, loss: float = 1.0, extra: dict | None = None
) -> None:
    """What torchtitan's loop does with its metrics processor."""
    for step in steps:
        with processor.step_memory(step):
            due = processor.should_log(step)
            processor.ntokens_since_last_log += 64
            processor.data_loading_times.append(0.0)
            if due:
                processor.log(step, loss * step, loss * step, 0.5, extra_metrics=extra)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is logged, as text."""
    caught: list[str] = []

    class Catch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            caught.append(record.getMessage())

    handler, level = Catch(), titan_logger.level
    titan_logger.addHandler(handler)
    titan_logger.setLevel(logging.INFO)
    yield caught
    titan_logger.removeHandler(handler)
    titan_logger.setLevel(level)


def test_the_console_line_has_everything(tmp_path: Path, lines: list[str]) -> None:
    processor = build(tmp_path, enable_tensorboard=False)
    extra = {"moe/aux_loss": 1.25, "moe/z_loss": 0.5, "lr/AdamW": 3e-4}
    run_steps(processor, range(1, 3), loss=2.0, extra=extra)
    line = lines[-1]
    for part in (
        "step: 2/10",
        "loss: 4.00000",
        "aux: 1.2500",
        "z: 0.5000",
        "grad_norm: 0.5000",
        "lr: 3.000e-04",
        "tokens/s: ",
        "memory: ",
        "left: ",
    ):
        assert part in line
    assert "MFU" not in line, "no MFU on CPU"
    assert "\033" not in line
    run_steps(processor, range(3, 4))
    assert "aux:" not in lines[-1], "no auxiliary loss, no column"


def test_curves_continue_over_a_resume(tmp_path: Path) -> None:
    first = build(tmp_path)
    run_steps(first, range(1, 9))
    first.close()
    resumed = build(tmp_path)
    run_steps(resumed, range(5, 11), loss=3.0)
    resumed.close()
    curves = scalars(tmp_path)
    assert curves["loss_metrics/global_avg_loss"] == [
        (step, step * (1.0 if step < 5 else 3.0)) for step in range(1, 11)
    ]
    for tag, points in curves.items():
        assert [step for step, _ in points] == list(range(1, 11)), tag
    assert [path.name for path in tmp_path.iterdir()] == ["tb"], "no folder per start"
    assert not any("mfu" in tag for tag in curves)


def test_a_resume_replaces_from_the_loaded_step_though_it_reports_later(tmp_path: Path) -> None:
    first = build(tmp_path, log_freq=1, total_steps=8)
    run_steps(first, range(1, 9))
    first.close()
    resumed = build(tmp_path, log_freq=5)
    run_steps(resumed, range(7, 11))
    resumed.close()
    steps = [step for step, _ in scalars(tmp_path)["grad_norm"]]
    assert steps == [1, 2, 3, 4, 5, 6, 10]


def test_reports_come_at_the_first_every_nth_and_the_last_step(tmp_path: Path) -> None:
    processor = build(tmp_path, log_freq=4, enable_tensorboard=False)
    assert [step for step in range(1, 11) if processor.should_log(step)] == [1, 4, 8, 10]


def test_tokens_of_all_ranks_and_validation_apart(tmp_path: Path, lines: list[str]) -> None:
    now = [0.0]
    processor = build(tmp_path, clock=lambda: now[0], log_freq=10)
    processor.should_log(1)
    processor.ntokens_since_last_log += 100
    now[0] += 2
    with processor.validating():
        processor.ntokens_since_last_log += 5000
        now[0] += 50
        processor.log_validation(loss=2.5, step=1, extra_metrics={"validation_metrics/x": 7.0})
    now[0] += 8
    processor.ntokens_since_last_log += 100
    processor.log(10, 1.0, 1.0, 1.0)
    processor.close()
    curves = scalars(tmp_path)
    # 200 tokens per rank; 4 ranks, 2 of which share a batch: 400 in 10 s.
    assert curves["throughput/tokens_per_second"] == [(10, 40.0)]
    assert curves["throughput/device_tokens_per_second"] == [(10, 10.0)]
    assert curves["time/step(s)"] == [(10, 1.0)]
    assert curves["validation_metrics/loss"] == [(1, 2.5)]
    assert curves["validation_metrics/tokens_per_second"] == [(1, 200.0)]
    assert curves["validation_metrics/x"] == [(1, 7.0)]
    assert "validation at step: 1/10  loss: 2.50000  took: 50s" in lines


def test_every_report_is_of_the_steps_since_the_last_one(tmp_path: Path) -> None:
    now = [0.0]
    processor = build(tmp_path, clock=lambda: now[0], log_freq=3)
    for step in range(1, 7):
        processor.should_log(step)
        now[0] += 4
        processor.ntokens_since_last_log += 60 * step
        processor.data_loading_times.append(0.5 * step)
        if step in (1, 3, 6):
            processor.log(step, 1.0, 1.0, 1.0)
    processor.close()
    curves = scalars(tmp_path)
    assert curves["time/step(s)"] == [(1, 4.0), (3, 4.0), (6, 4.0)]
    assert curves["time/data_loading(s)"] == [(1, 0.5), (3, 1.25), (6, 2.5)]
    # Steps 1; 2 and 3; 4 to 6, of which two of the four ranks counted the same tokens.
    rates = [2 * 60 / 4, 2 * 60 * 5 / 8, 2 * 60 * 15 / 12]
    assert [rate for _, rate in curves["throughput/tokens_per_second"]] == rates


def test_building_a_run_is_no_part_of_its_first_step(tmp_path: Path) -> None:
    now = [0.0]
    processor = build(tmp_path, clock=lambda: now[0])
    now[0] += 30
    processor.should_log(1)
    now[0] += 5
    processor.log(1, 1.0, 1.0, 1.0)
    processor.close()
    assert scalars(tmp_path)["time/step(s)"] == [(1, 5.0)]


def test_the_time_of_a_measured_step_is_left_out(tmp_path: Path) -> None:
    now = [0.0]
    processor = build(tmp_path, clock=lambda: now[0], log_freq=4)
    seconds = {1: 5.0, 2: 1.0, 3: 1.0, 4: 7.0, 5: 2.0, 6: 2.0, 7: 2.0, 8: 9.0}
    for step, took in seconds.items():
        with processor.step_memory(step):
            processor.should_log(step)
            processor.ntokens_since_last_log += 10
            now[0] += took
            if processor.should_log(step):
                processor.log(step, 1.0, 1.0, 1.0)
    processor.close()
    curves = scalars(tmp_path)
    # Step 1 is all there is; then steps 2 and 3, then 5 to 7.
    assert curves["time/step(s)"] == [(1, 5.0), (4, 1.0), (8, 2.0)]
    # 10 tokens a step on each of 4 ranks, 2 of which share a batch.
    assert curves["throughput/tokens_per_second"] == [(1, 4.0), (4, 20.0), (8, 10.0)]


def test_live_tensors_are_measured_in_reported_steps_only(tmp_path: Path) -> None:
    processor = build(tmp_path, log_freq=2)
    module = nn.Linear(DIM, DIM, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    processor.model_parts, processor.optimizers = [module], Optimizers([optimizer])
    weight_bytes = DIM * DIM * 4
    for step in range(1, 5):
        with processor.step_memory(step):
            optimizer.zero_grad()
            module(torch.ones(1, DIM)).sum().backward()
            optimizer.step()
            within = processor.device_memory_monitor.get_peak_stats()
        after = processor.device_memory_monitor.get_peak_stats()
        if step == 3:
            assert after.max_active_gib == 0, "not a reported step"
        else:
            # Weight, its gradient and momentum at least, and less than twice that.
            assert 3 * weight_bytes <= after.max_active_gib * 1024**3 < 6 * weight_bytes
        assert within.max_active_gib == after.max_active_gib, "known before the step is over"
        processor.device_memory_monitor.reset_peak_stats()
    processor.close()


def test_the_live_peak_is_that_of_the_step_that_is_reported(tmp_path: Path) -> None:
    processor = build(tmp_path, log_freq=1)
    for step, num_elements in ((1, 1000), (2, 500)):
        with processor.step_memory(step):
            torch.empty(num_elements)
            processor.should_log(step)
            processor.log(step, 1.0, 1.0, 1.0)
    processor.close()
    points = scalars(tmp_path)["memory/live_peak(GiB)"]
    assert [(step, round(value * 1024**3)) for step, value in points] == [(1, 4000), (2, 2000)]


def test_measuring_can_be_turned_off(tmp_path: Path) -> None:
    processor = build(tmp_path, track_live_tensors=False)
    run_steps(processor, range(1, 3))
    processor.close()
    curves = scalars(tmp_path)
    assert "memory/live_peak(GiB)" not in curves
    assert curves["memory/rss_peak(GiB)"][0][1] > 0.01


def test_sources_are_asked_at_every_report(tmp_path: Path) -> None:
    processor = build(tmp_path, log_freq=2)
    sent_bytes = iter((100.0, 200.0, 300.0, 400.0, 500.0, 600.0))
    processor.add_curves(lambda: {"relay/bytes_sent": next(sent_bytes)}, over="sum")
    processor.add_curves(lambda: {"relay/wait_seconds": 0.5}, over="max")
    run_steps(processor, range(1, 5))
    processor.close()
    curves = scalars(tmp_path)
    assert curves["relay/bytes_sent"] == [(1, 100.0), (2, 200.0), (4, 300.0)]
    assert [step for step, _ in curves["relay/wait_seconds"]] == [1, 2, 4]


def test_running_out_of_memory_reports_the_peak(tmp_path: Path, lines: list[str]) -> None:
    processor = build(tmp_path)
    with pytest.raises(torch.OutOfMemoryError), processor.step_memory(3):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert any(line.startswith("Out of memory in step 3: at most 0.00 GiB") for line in lines)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), processor.step_memory(4):
        torch.empty(2**60)
    assert any("Out of memory in step 4" in line for line in lines)
    with pytest.raises(ValueError, match="other"), processor.step_memory(5):
        raise ValueError("other")
    assert not any("in step 5" in line for line in lines)
    processor.close()


def test_a_second_run_in_the_folder_stops_with_one_line(tmp_path: Path) -> None:
    first = build(tmp_path)
    with pytest.raises(FolderError, match="another run is writing there"):
        build(tmp_path)
    build(tmp_path, save_tb_folder="tb2").close()
    build(tmp_path, enable_tensorboard=False).close()
    first.close()
    build(tmp_path).close()


def test_the_cpu_monitor_has_torchtitans_interface() -> None:
    monitor = CpuMemoryMonitor()
    with monitor.measure_live(torch.ones(256)):
        torch.empty(2**18)
    with monitor.measure_live():
        torch.empty(2**17)
    stats = monitor.get_peak_stats()
    assert stats.max_active_gib == (1024 + 2**20) / 1024**3
    assert stats.max_active_pct == pytest.approx(
        100 * stats.max_active_gib / monitor.device_capacity_gib
    )
    assert 0 < stats.max_reserved_gib < monitor.device_capacity_gib
    assert (stats.num_alloc_retries, stats.num_ooms) == (0, 0)
    monitor.reset_peak_stats()
    assert monitor.get_peak_stats().max_active_gib == 0
    assert monitor.device_name == "CPU"
    curves = monitor.curves()
    assert curves["memory/rss(GiB)"] <= curves["memory/rss_peak(GiB)"]


def test_the_resident_set_follows_a_large_allocation() -> None:
    monitor = CpuMemoryMonitor()
    before = monitor.curves()["memory/rss(GiB)"]
    block = torch.ones(2**24)  # 64 MiB
    after = monitor.curves()["memory/rss(GiB)"]
    # Others in this process may free a little at the same time.
    assert after - before > 0.05
    assert block.numel() == 2**24
