"""Do the keys of a configuration go together on a given number of ranks?

Each value by itself is already right when a `RunConfig` comes from `load_config`; what is left are
the rules between keys. Runs on every rank before any process group exists, from numbers and file
names only, so that all ranks come to the same answer. Rules about data are in
`titan_relay.data.check`, those of a model's family in its file; `titan_relay.validate` asks all.
"""

import dataclasses
import importlib.util
from pathlib import Path

from titan_relay.config.check_model import check_model
from titan_relay.config.check_parallelism import check_parallelism
from titan_relay.config.errors import Sources
from titan_relay.config.schema import AttentionRetentionConfig, RunConfig


def check_keys(
    config: RunConfig, world_size: int, sources: Sources | str, *, files: bool = True
) -> None:
    """Raise `ConfigError`, naming file, key, value and what would be right, or return.

    world_size: ranks of the whole run.
    sources: `Loaded.sources`, or a name to put in the place of the file.
    files: also look whether the initial checkpoint exists; False to check a configuration for
        another machine.
    """
    if isinstance(sources, str):
        sources = Sources(sources)
    check_model(config, sources)
    check_parallelism(config, world_size, sources)
    _check_schedule(config, sources)
    _check_recompute(config, sources)
    _check_debug(config, sources)
    _check_profiler(config, sources)
    _check_checkpoint(config, sources, files=files)
    _check_reporting(config, sources)


def _check_schedule(config: RunConfig, sources: Sources) -> None:
    """Raise `ConfigError` where training outlasts the learning-rate schedule."""
    total, steps = config.lr_scheduler.total_steps, config.training.steps
    if total is not None and total < steps:
        raise sources.error(
            "lr_scheduler.total_steps",
            total,
            f"must be at least training.steps = {steps}; past its end the learning rate is "
            "undefined",
        )


def _check_recompute(config: RunConfig, sources: Sources) -> None:
    """Raise `ConfigError` for the other dispatcher's section, or a budget nobody spends."""
    _check_who_decides(config, sources)
    _check_retention(config, sources)
    if config.activation_checkpoint.mode != "memory_budget":
        return
    if not config.compile.enable or "model" not in config.compile.components:
        raise sources.error(
            "activation_checkpoint.mode",
            "memory_budget",
            'needs compile.enable = true with "model" in compile.components; '
            'or use "none", "selective" or "full"',
        )


def _check_who_decides(config: RunConfig, sources: Sources) -> None:
    """What is computed again has one owner: each dispatcher its section."""
    mode = config.activation_checkpoint.mode
    if config.relay.dispatcher == "relay":
        if mode != "none":
            raise sources.error(
                "activation_checkpoint.mode",
                mode,
                'must be "none" with relay.dispatcher = "relay", where [attention_retention] '
                "decides what is computed again; leave it out",
            )
        return
    defaults = AttentionRetentionConfig()
    for field in dataclasses.fields(defaults):
        value = getattr(config.attention_retention, field.name)
        if value != getattr(defaults, field.name):
            raise sources.error(
                f"attention_retention.{field.name}",
                value,
                'needs relay.dispatcher = "relay"; with "alltoall" [activation_checkpoint] '
                "decides what is computed again; leave it out",
            )


def _check_retention(config: RunConfig, sources: Sources) -> None:
    """Levels are chosen in one way, and a budget has somebody who spends it."""
    retention, num_layers = config.attention_retention, config.model.num_layers
    if retention.layers is not None and len(retention.layers) != num_layers:
        raise sources.error(
            "attention_retention.layers",
            retention.layers,
            f"must have a level for each of model.num_layers = {num_layers}, not "
            f'{len(retention.layers)}; one level for all is mode = "full" and the like',
        )
    if retention.layers is not None and retention.mode != "recompute":
        raise sources.error(
            "attention_retention.mode",
            retention.mode,
            "attention_retention.layers is given too; give one of them",
        )
    if (retention.block_inputs == "device") != (retention.host_budget_gib is None):
        raise sources.error(
            "attention_retention.host_budget_gib",
            retention.host_budget_gib,
            'goes together with attention_retention.block_inputs = "host" or "auto"; give both or '
            "neither",
        )
    decides = "auto" in (retention.mode, retention.block_inputs)
    if retention.safety_margin != AttentionRetentionConfig().safety_margin and not decides:
        raise sources.error(
            "attention_retention.safety_margin",
            retention.safety_margin,
            'needs mode = "auto" or block_inputs = "auto"; leave it out',
        )
    if retention.mode != "auto" and retention.budget_gib != "auto":
        raise sources.error(
            "attention_retention.budget_gib",
            retention.budget_gib,
            'needs attention_retention.mode = "auto"; leave it out',
        )


def _check_debug(config: RunConfig, sources: Sources) -> None:
    """Raise `ConfigError` for a promise that nothing would keep."""
    if config.relay.deterministic and config.relay.dispatcher != "relay":
        raise sources.error(
            "relay.deterministic",
            True,
            'needs relay.dispatcher = "relay"; use debug.deterministic',
        )
    if conflict := config.relay.conflict():
        key, needs = conflict
        raise sources.error(
            f"relay.{key}", getattr(config.relay, key), f"needs relay.{needs}; leave it out"
        )
    if config.debug.deterministic_warn_only and not config.debug.deterministic:
        raise sources.error(
            "debug.deterministic_warn_only", True, "needs debug.deterministic = true"
        )


def _check_reporting(config: RunConfig, sources: Sources) -> None:
    """Raise `ConfigError` for a report whose package is not installed."""
    for key, wanted, package in (
        ("metrics.enable_tensorboard", config.metrics.enable_tensorboard, "tensorboard"),
        ("metrics.enable_wandb", config.metrics.enable_wandb, "wandb"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise sources.error(
                key, True, f"the package {package} is not installed; install it, or use false"
            )


def _check_profiler(config: RunConfig, sources: Sources) -> None:
    """Raise `ConfigError` for a profiling cycle too short for its warm-up and recording."""
    profiler = config.profiler
    needed = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < needed:
        raise sources.error(
            "profiler.profile_freq",
            profiler.profile_freq,
            f"must be at least profiler_warmup + profiler_active = {profiler.profiler_warmup} + "
            f"{profiler.profiler_active} = {needed}",
        )


def _check_checkpoint(config: RunConfig, sources: Sources, *, files: bool) -> None:
    """Raise `ConfigError` for checkpoint keys that contradict each other."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return
    if checkpoint.initial_load_in_hf and checkpoint.initial_load_path is None:
        raise sources.error(
            "checkpoint.initial_load_in_hf", True, "needs checkpoint.initial_load_path"
        )
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        raise sources.error(
            "checkpoint.initial_load_model_only",
            False,
            "a Hugging Face checkpoint holds only the model; use true",
        )
    if checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        raise sources.error(
            "checkpoint.last_save_model_only",
            False,
            "checkpoint.last_save_in_hf = true writes only the model; use true",
        )
    if checkpoint.load_only and checkpoint.enable_first_step_checkpoint:
        raise sources.error(
            "checkpoint.enable_first_step_checkpoint",
            True,
            "checkpoint.load_only = true saves nothing; use false",
        )
    _check_initial_path(config, sources, files=files)


def _check_initial_path(config: RunConfig, sources: Sources, *, files: bool) -> None:
    given = config.checkpoint.initial_load_path
    if given is None:
        return
    remote = "://" in given
    if remote and config.checkpoint.initial_load_in_hf:
        raise sources.error(
            "checkpoint.initial_load_path",
            given,
            "a Hugging Face checkpoint must be in a local folder",
        )
    if remote:
        return
    if not Path(given).is_absolute():
        raise sources.error(
            "checkpoint.initial_load_path",
            given,
            f'must be an absolute path; write "{Path.cwd() / given}"',
        )
    if files and not Path(given).is_dir():
        raise sources.error("checkpoint.initial_load_path", given, "no such folder")
