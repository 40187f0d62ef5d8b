"""Keys of running a job: checkpoints, metrics, communication, profiling, debugging.

Names and defaults are torchtitan's, except that debug.seed is a number so that a run can be
repeated.
"""

from dataclasses import dataclass
from typing import Literal

from titan_relay.config.fields import option


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving and resuming."""

    enable: bool = option(False)
    """Save checkpoints, and resume from the newest one in the folder."""

    folder: str = option("checkpoint", not_empty=True, path=True)
    """Where checkpoints go, inside dump_folder."""

    interval: int = option(500, at_least=1, needs="load_only = false")
    """Steps between checkpoints."""

    initial_load_path: str | None = option(None, not_empty=True, path=True, request=True)
    """Checkpoint to start from while the folder is empty: an absolute path or a remote address."""

    initial_load_model_only: bool = option(True, needs="initial_load_path")
    """Take only the weights from initial_load_path, not optimizer, schedule and data position."""

    initial_load_in_hf: bool = option(False, needs="initial_load_path", request=True)
    """initial_load_path holds Hugging Face safetensors."""

    last_save_model_only: bool = option(True, needs="load_only = false")
    """The checkpoint after the last step holds only weights. false: training can go on from it."""

    last_save_in_hf: bool = option(False, needs="load_only = false", request=True)
    """Write the checkpoint after the last step as Hugging Face safetensors."""

    export_dtype: Literal["float16", "bfloat16", "float32"] = option(
        "float32", needs="last_save_model_only"
    )
    """Type of the weights in a last checkpoint that holds only weights."""

    keep_latest_k: int = option(10, at_least=2, also=(0,), needs="load_only = false")
    """Checkpoints to keep; older ones are deleted. 0: all."""

    load_step: int = option(-1, at_least=0, also=(-1,), request=True)
    """Step to resume from; later checkpoints are renamed, once. -1: the newest."""

    exclude_from_loading: tuple[
        Literal["optimizer", "lr_scheduler", "dataloader", "train_state"], ...
    ] = option(())
    """States that start afresh when resuming."""

    enable_first_step_checkpoint: bool = option(False)
    """Save after step 1 too, to see early that saving works."""

    load_only: bool = option(False, request=True)
    """Resume but never save."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = option(
        "disabled", needs="load_only = false"
    )
    """disabled: training waits for the save. async: a thread saves. async_with_pinned_mem: copied
    to pinned memory, then another process saves."""

    on_save_error: Literal["stop", "continue"] = option("stop", titan="")
    """What to do when a checkpoint cannot be written (no room, no right): stop the run, or say so
    and go on. The last save stops always."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """What is reported, and where."""

    log_freq: int = option(10, at_least=1)
    """Steps between reports to the console and to TensorBoard."""

    enable_tensorboard: bool = option(False)
    """Write TensorBoard curves; a resumed run continues the same ones."""

    disable_color_printing: bool = option(False)
    """No colours on the console."""

    save_tb_folder: str = option("tb", not_empty=True, path=True, needs="enable_tensorboard")
    """Where TensorBoard files go, inside dump_folder."""

    save_for_all_ranks: bool = option(False, needs=("enable_tensorboard", "enable_wandb"))
    """Write curves for every rank, not only for the one that reports the loss."""

    enable_wandb: bool = option(False)
    """Report to Weights & Biases too; needs the wandb package."""

    plan: bool = option(False, titan="")
    """Plan the run's memory in another process at the lowest priority while the first steps run;
    log it, write it to TensorBoard, and hold it against what the first step took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommConfig:
    """Process groups."""

    init_timeout_seconds: int = option(300, at_least=1)
    """How long a collective may take until the first step is done."""

    train_timeout_seconds: int = option(100, at_least=1)
    """How long a collective, or a hop of the ring, may take after the first step."""

    trace_buf_size: int = option(20000, at_least=0)
    """Collectives that the flight recorder remembers for a report after a time-out. 0: off."""

    save_traces_folder: str = option(
        "comm_traces", not_empty=True, path=True, needs="trace_buf_size > 0"
    )
    """Where flight records go, inside dump_folder."""

    save_traces_file_prefix: str = option("rank_", not_empty=True, needs="trace_buf_size > 0")
    """Start of a flight record's file name, before the rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilerConfig:
    """Traces of time and of memory."""

    enable_profiling: bool = option(False)
    """Write PyTorch profiler traces."""

    save_traces_folder: str = option(
        "profiling/traces", not_empty=True, path=True, needs="enable_profiling"
    )
    """Where traces go, inside dump_folder."""

    profile_freq: int = option(10, at_least=1, needs=("enable_profiling", "enable_memory_snapshot"))
    """Steps per profiling cycle; one trace per cycle."""

    profiler_repeat: int | None = option(None, at_least=0, needs="enable_profiling")
    """Cycles to run. none or 0: until training ends."""

    profiler_skip_first: int | None = option(None, at_least=0, needs="enable_profiling")
    """Steps before the first cycle. none: 0."""

    profiler_skip_first_wait: int | None = option(None, at_least=0, needs="enable_profiling")
    """1 or more: the first cycle does not wait before its warm-up. none: 0."""

    profiler_active: int = option(1, at_least=1, needs="enable_profiling")
    """Steps recorded per cycle."""

    profiler_warmup: int = option(3, at_least=0, needs="enable_profiling")
    """Steps traced and thrown away before the recorded ones."""

    enable_memory_snapshot: bool = option(False)
    """Write snapshots of the CUDA allocator; also when memory runs out."""

    memory_snapshot_freq: int | None = option(None, at_least=1, needs="enable_memory_snapshot")
    """Steps between memory snapshots. none: profile_freq."""

    save_memory_snapshot_folder: str = option(
        "profiling/memory_snapshot",
        not_empty=True,
        path=True,
        needs="enable_memory_snapshot",
    )
    """Where memory snapshots go, inside dump_folder."""

    memory_snapshot_max_entries: int = option(1_000_000, at_least=1, needs="enable_memory_snapshot")
    """Allocations and frees remembered per snapshot; older ones are dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugConfig:
    """Repeatability and fault finding."""

    seed: int = option(0, at_least=0)
    """Initial weights, the order of the documents and all other randomness follow from it, and
    not from the number of ranks."""

    deterministic: bool = option(False)
    """Use only deterministic algorithms; slower."""

    deterministic_warn_only: bool = option(False, needs="deterministic", request=True)
    """With deterministic: warn about an operator that has no such algorithm, do not stop."""

    moe_force_load_balance: bool = option(False)
    """Send every expert the same number of tokens, whatever the router says. For measuring."""

    check_finite: bool = option(False, titan="")
    """Look for NaN and infinity in the input of every layer's experts, and stop all ranks naming
    layer and token. Costs a pass over the tokens of every layer."""

    detect_anomaly: bool = option(False)
    """Say which forward operator led to a NaN in backward. Slow."""

    print_config: bool = option(False)
    """Log the whole configuration at the start of training."""
