"""What a run reports: a console line, TensorBoard curves, memory.

`RelayMetricsProcessor` takes the place of torchtitan's `MetricsProcessor`. Every curve, with its
unit and meaning, is in docs/metrics.md.

Ranks: `log`, `log_validation` and the constructor are called on every rank and reduce over ranks;
only the metrics rank (rank 0, or the first rank of the last pipeline stage) has files to write, or
every rank with `save_for_all_ranks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    MetricsProcessor,
    WandBLogger,
)
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import Color, NoColor

from titan_relay.titan.device import on_cpu
from titan_relay.titan.metrics.console import RunProgress, train_line, validation_line
from titan_relay.titan.metrics.folder_lock import FolderError
from titan_relay.titan.metrics.memory import (
    CpuMemoryMonitor,
    build_memory_monitor,
    device_curves,
    is_out_of_memory,
)
from titan_relay.titan.metrics.over_ranks import (
    Curves,
    Reduction,
    over_ranks,
    raise_together,
)
from titan_relay.titan.metrics.speed import Speed, SpeedMeter, TimeLeft, known_peak_flops
from titan_relay.titan.metrics.tensorboard import CurveLogger
from titan_relay.titan.private_torchtitan import loggers_of, metrics_rank
from titan_relay.units import GIB, in_gib


@dataclass(frozen=True)
class _Interval:
    """What the trainer's loop counted on this rank from the last report to a moment."""

    until: float
    num_tokens: int
    num_steps: int
    data_seconds: float


class RelayMetricsProcessor(MetricsProcessor):
    """Reports of a run that may be one of several that make up the same curves.

    torchtitan's own constructor is not called: it builds a CUDA memory monitor and a folder named
    after the minute. Its attributes and its interface towards the trainer are kept.

    Args:
        config: `[metrics]`, with what else the reports need.
        parallel_dims: the layout of the ranks.
        dump_folder: folder of the run; curves go to `dump_folder/save_tb_folder`.
        pp_schedule: decides which pipeline stage has the loss.
        config_dict: the whole configuration, for Weights & Biases.
        has_quantization: no MFU then, since the peak is that of bfloat16.
        clock: gives the time in seconds.

    Raises:
        FolderError: on every rank, if a rank cannot have its folder for itself.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        total_steps: int
        """Steps of the whole run, for the time that is left."""

        track_live_tensors: bool = True
        """On CPU, measure the live-tensor peak of steps that are reported. Off where the model is
        compiled, since measuring runs it eagerly, which rounds differently."""

    config: Config

    def __init__(
        self,
        config: Config,
        *,
        parallel_dims: ParallelDims,
        dump_folder: str = "./outputs",
        pp_schedule: str = "1F1B",
        config_dict: dict[str, Any] | None = None,
        has_quantization: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.parallel_dims = parallel_dims
        self.has_quantization = has_quantization
        self.color = NoColor() if config.disable_color_printing else Color()
        self.device_memory_monitor = build_memory_monitor()
        peak_flops = known_peak_flops(self.device_memory_monitor.device_name, on_cpu())
        self.gpu_peak_flops = peak_flops or float("nan")
        # Set by the trainer once these exist.
        self.num_flops_per_token = -1
        self.optimizers = None
        self.model_parts = None
        # Written to by the trainer's and the validator's loops over batches.
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []

        self._first_step: int | None = None
        self._reported_step = 0
        self._validation_start: float | None = None
        self._unmeasured: _Interval | None = None
        self.live_peak_bytes: int | None = None
        """This rank's live-tensor peak at its last report; None before."""
        self._curves: list[tuple[Curves, Reduction | Literal["same"]]] = []
        self._clock = clock
        self._time_left = TimeLeft(config.total_steps, clock)
        peak = None if has_quantization else peak_flops
        self._speed = SpeedMeter(parallel_dims.world_size, peak, clock)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.is_metrics_rank = rank == metrics_rank(parallel_dims, pp_schedule)
        """Whether this rank reports: it has the loss."""
        self.logger = self._build_loggers(dump_folder, rank, config_dict)

    def add_curves(self, curves: Curves, over: Reduction | Literal["same"] = "same") -> None:
        """Have `curves()` asked at every report, on every rank.

        over: how the ranks' values become one: "max", "sum" or "mean", or "same" if every rank is
        given the same values already. `curves` may communicate: all ranks ask alike.
        """
        self._curves.append((curves, over))

    def should_log(self, step: int) -> bool:
        """Whether to report after `step`: the first, every `log_freq`-th and the last step."""
        if self._first_step is None:
            # The trainer asks before every step, so the first question names the first step.
            self._first_step = step
            self._reported_step = step - 1
            self._speed.restart()  # building and loading were no step
        return super().should_log(step) or step == self.config.total_steps

    @contextmanager
    def step_memory(self, step: int) -> Iterator[None]:
        """Goes around one whole optimizer step: measures its live-tensor peak where that is due.

        That is on CPU, for steps that are reported. When memory runs out, the peaks so far are
        logged before the error goes on.
        """
        try:
            with self._live_measurement(step):
                yield
        except Exception as error:
            if is_out_of_memory(error):
                self._report_out_of_memory(step)
            raise

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Goes around one validation: its time and tokens do not count as training's."""
        train_tokens, self.ntokens_since_last_log = self.ntokens_since_last_log, 0
        self._validation_start = start = self._clock()
        try:
            yield
        finally:
            self._validation_start = None
            self.ntokens_since_last_log = train_tokens
            self._speed.skip(self._clock() - start)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Report after `step`; collective.

        Args:
            global_avg_loss: mean loss per token of the whole batch.
            global_max_loss: largest mean loss of one rank.
            grad_norm: before clipping.
            extra_metrics: further curves, the same on every rank.

        What was added with `add_curves` takes the place of what torchtitan's loop hands in here.
        """
        speed = self._read_speed(step)
        curves = {
            "loss_metrics/global_avg_loss": global_avg_loss,
            "loss_metrics/global_max_loss": global_max_loss,
            "grad_norm": grad_norm,
            **speed.curves(),
            **self._memory_curves(),
            **(extra_metrics or {}),
            **self._added_curves(),
        }
        # Both are float32 sums, in another order: where ranks are alike, the mean may round higher.
        loss = curves["loss_metrics/global_avg_loss"]
        curves["loss_metrics/global_max_loss"] = max(curves["loss_metrics/global_max_loss"], loss)
        self.logger.log(curves, step)
        seconds_left = self._time_left.seconds(step, speed.seconds_per_step)
        progress = RunProgress(step, self.config.total_steps, seconds_left)
        if self.is_metrics_rank:
            logger.info(train_line(progress, loss, grad_norm, speed, curves, self.color))
        self._reported_step = step
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.device_memory_monitor.reset_peak_stats()
        self._speed.restart()

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Report a validation after `step`; its speed only if called within `validating`."""
        curves = {"validation_metrics/loss": loss}
        seconds = None
        if self._validation_start is not None:
            seconds = self._clock() - self._validation_start
            tokens_per_second = self._global_tokens(self.ntokens_since_last_log) / max(
                seconds, 1e-9
            )
            curves["validation_metrics/tokens_per_second"] = tokens_per_second
        curves.update(extra_metrics or {})
        self.logger.log(curves, step)
        if self.is_metrics_rank:
            logger.info(validation_line(step, self.config.total_steps, loss, seconds, self.color))

    def note(self, tag: str, text: str, step: int) -> None:
        """Write a text beside the curves, on a rank that writes them."""
        for each in loggers_of(self.logger):
            if isinstance(each, CurveLogger):
                each.log_text(tag, text, step)

    def close(self) -> None:
        """Close the files and let other runs use the folder."""
        self.logger.close()

    def _build_loggers(
        self, dump_folder: str, rank: int, config_dict: dict[str, Any] | None
    ) -> BaseLogger:
        folder = Path(dump_folder) / self.config.save_tb_folder
        if self.config.save_for_all_ranks:
            folder /= f"rank_{rank}"
        elif not self.is_metrics_rank:
            raise_together(None)
            return BaseLogger()
        loggers, message = LoggerContainer(), None
        try:
            if self.config.enable_tensorboard:
                loggers.add_logger(CurveLogger(folder, lambda: self._first_step))
            if self.config.enable_wandb:
                loggers.add_logger(_wandb_logger(folder, config_dict))
        except FolderError as error:
            message = str(error)
        try:
            raise_together(message)
        except FolderError:
            loggers.close()
            raise
        return loggers

    def _live_measurement(self, step: int) -> Any:
        monitor = self.device_memory_monitor
        if (
            not isinstance(monitor, CpuMemoryMonitor)
            or not self.config.track_live_tensors
            or not self.should_log(step)
        ):
            return nullcontext()
        # The measured step is slow for that reason alone: its time is left out of the speed if
        # there are others to go by.
        if step - 1 > self._reported_step:
            self._unmeasured = self._interval(step - 1)
        optimizers = self.optimizers.optimizers if self.optimizers is not None else ()
        return monitor.measure_live(*(self.model_parts or ()), *optimizers)

    def _report_out_of_memory(self, step: int) -> None:
        monitor = self.device_memory_monitor
        stats = monitor.get_peak_stats()
        logger.error(
            f"Out of memory in step {step}: at most {in_gib(stats.max_active_gib * GIB)} were live "
            f"and {in_gib(stats.max_reserved_gib * GIB)} reserved, of "
            f"{in_gib(monitor.device_capacity)}"
        )

    def _global_tokens(self, num_tokens: int) -> float:
        """Tokens of all ranks together; the ranks that share a batch counted the same tokens."""
        dims = self.parallel_dims
        return num_tokens * dims.world_size / dims.non_data_parallel_size

    def _interval(self, step: int) -> _Interval:
        return _Interval(
            until=self._clock(),
            num_tokens=self.ntokens_since_last_log,
            num_steps=max(1, step - self._reported_step),
            data_seconds=sum(self.data_loading_times),
        )

    def _read_speed(self, step: int) -> Speed:
        assert self.num_flops_per_token > 0, "num_flops_per_token must be set"
        interval = self._unmeasured or self._interval(step)
        self._unmeasured = None
        return self._speed.read(
            global_tokens=self._global_tokens(interval.num_tokens),
            num_steps=interval.num_steps,
            data_seconds=interval.data_seconds,
            flops_per_token=self.num_flops_per_token,
            until=interval.until,
        )

    def _added_curves(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for curves, over in self._curves:
            values = curves()
            found |= values if over == "same" else over_ranks(values, over)
        return found

    def _memory_curves(self) -> dict[str, float]:
        monitor = self.device_memory_monitor
        if isinstance(monitor, CpuMemoryMonitor):
            self.live_peak_bytes = monitor.live_peak_bytes
            return over_ranks(monitor.curves(), "max")
        curves = device_curves(monitor)
        self.live_peak_bytes = int(curves["memory/live_peak(GiB)"] * GIB)
        return over_ranks(curves, "max")


def _wandb_logger(folder: Path, config_dict: dict[str, Any] | None) -> WandBLogger:
    try:
        return WandBLogger(str(folder), config_dict=config_dict)
    except Exception as error:  # whatever Weights & Biases raises: not installed, not logged in
        raise FolderError(f"metrics.enable_wandb = true: it did not start: {error}") from error
