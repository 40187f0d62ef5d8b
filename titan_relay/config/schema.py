"""The whole configuration: one `RunConfig` with a field per TOML section.

Immutable; change one with `dataclasses.replace`. Importing it needs neither torch nor
torchtitan, so that a wrong configuration is reported before anything heavy starts.
"""
# ruff: noqa: RUF009  (option() and section() return dataclass fields, not shared values)

import functools
from dataclasses import dataclass

from titan_relay.config.fields import Key, keys_in, option, section, sections_in
from titan_relay.config.schema_data import (
    DataConfig,
    MixtureEntry,
    TokenizerConfig,
    ValidatorConfig,
)
from titan_relay.config.schema_model import LossConfig, MLAConfig, ModelConfig, MoEConfig
from titan_relay.config.schema_relay import AttentionRetentionConfig, RelayConfig
from titan_relay.config.schema_run import (
    CheckpointConfig,
    CommConfig,
    DebugConfig,
    MetricsConfig,
    ProfilerConfig,
)
from titan_relay.config.schema_train import (
    ActivationCheckpointConfig,
    CompileConfig,
    LRSchedulerConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)

__all__ = [
    "ActivationCheckpointConfig",
    "AttentionRetentionConfig",
    "CheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "DataConfig",
    "DebugConfig",
    "LRSchedulerConfig",
    "LossConfig",
    "MLAConfig",
    "MetricsConfig",
    "MixtureEntry",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "ProfilerConfig",
    "RelayConfig",
    "RunConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "ValidatorConfig",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that one training run depends on."""

    dump_folder: str = option("outputs", not_empty=True, path=True)
    """Folder of everything a run writes: checkpoints, TensorBoard curves, traces."""

    model: ModelConfig = option()
    """The architecture."""

    relay: RelayConfig = section(RelayConfig)
    """How tokens and experts meet."""

    training: TrainingConfig = section(TrainingConfig)
    """Batch, sequence, number of steps, precision."""

    parallelism: ParallelismConfig = section(ParallelismConfig)
    """Degrees of each kind of parallelism."""

    data: DataConfig = section(DataConfig)
    """The documents to train on."""

    tokenizer: TokenizerConfig = section(TokenizerConfig)
    """How text becomes token ids."""

    loss: LossConfig = section(LossConfig)
    """The training loss."""

    optimizer: OptimizerConfig = section(OptimizerConfig)
    """The optimizer."""

    lr_scheduler: LRSchedulerConfig = section(LRSchedulerConfig)
    """The learning rate's course."""

    attention_retention: AttentionRetentionConfig = section(
        AttentionRetentionConfig, needs='relay.dispatcher = "relay"', request=True
    )
    """What blocks keep for backward, with the relay."""

    activation_checkpoint: ActivationCheckpointConfig = section(
        ActivationCheckpointConfig, needs='relay.dispatcher = "alltoall"'
    )
    """What is computed again in backward, with the all-to-all."""

    compile: CompileConfig = section(CompileConfig, needs="enable")
    """torch.compile."""

    checkpoint: CheckpointConfig = section(CheckpointConfig, needs="enable")
    """Saving and resuming."""

    validator: ValidatorConfig = section(ValidatorConfig, needs="enable")
    """Loss on held-out documents."""

    metrics: MetricsConfig = section(MetricsConfig)
    """What is reported."""

    comm: CommConfig = section(CommConfig)
    """Process groups."""

    profiler: ProfilerConfig = section(ProfilerConfig)
    """Traces of time and memory."""

    debug: DebugConfig = section(DebugConfig)
    """Repeatability and fault finding."""


@functools.cache
def sections() -> dict[str, type]:
    """Dataclass of every section by its dotted path; "" is the file's top level."""
    return sections_in(RunConfig)


@functools.cache
def keys() -> dict[str, Key]:
    """Every key by its dotted path, in the order of the schema."""
    return keys_in(RunConfig)
