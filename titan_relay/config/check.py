"""Do the keys of a configuration go together on a given number of ranks?

Each value by itself is already right when a `RunConfig` comes from `load_config`; what is left are
the rules between keys. Runs on every rank before any process group exists, from numbers and file
names only, so that all ranks come to the same answer. Rules about data are in
`titan_relay.data.check`, those of a model's family in its file; `titan_relay.validate` asks all.
"""

import importlib.util
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from titan_relay.config.check_model import check_model
from titan_relay.config.check_parallelism import check_parallelism
from titan_relay.config.errors import COMMAND_LINE, Origins, Refusal
from titan_relay.config.fields import Key
from titan_relay.config.schema import RunConfig, keys
from titan_relay.config.toml import parse_value


def check_keys(config: RunConfig, world_size: int, origins: Origins, *, files: bool = True) -> None:
    """Raise `ConfigError`, naming file, key, value and what would be right, or return.

    world_size: ranks of the whole run.
    files: also look whether the initial checkpoint exists; False to check a configuration for
        another machine.
    """
    check_model(config, origins)
    origins.refuse(config, _check_requests(config))
    check_parallelism(config, world_size, origins)
    origins.refuse(
        config,
        _check_schedule(config),
        _check_who_decides(config),
        _check_retention(config),
        _check_debug(config),
        _check_profiler(config),
        _check_checkpoint(config, files=files),
        _check_reporting(config, files=files),
    )


def remarks(config: RunConfig, origins: Origins) -> Iterator[str]:
    """What is no mistake and may be none of the user's intentions, a line each."""
    idle = [
        f"--{key.path} ({why})"
        for key in keys().values()
        if origins.given.get(key.path) == COMMAND_LINE and (why := _unmet(config, key))
    ]
    if idle:
        yield f"Without effect here: {', '.join(idle)}"
    warmup, total = config.lr_scheduler.warmup_steps, schedule_steps(config)
    if warmup > total:
        yield (
            f"lr_scheduler.warmup_steps = {warmup} is more than the {total} steps of the schedule: "
            "the learning rate rises to its end; for a part of a longer run set "
            "lr_scheduler.total_steps to the length of that"
        )


def schedule_steps(config: RunConfig) -> int:
    """Steps over which the learning rate's course is laid out."""
    return config.lr_scheduler.total_steps or config.training.steps


def _check_requests(config: RunConfig) -> Iterator[Refusal]:
    """Yield a `Refusal` for each key that asks for what nothing would do."""
    for key in keys().values():
        asked = key.rule.request and attrgetter(key.path)(config) != key.default
        if asked and (why := _unmet(config, key)):
            yield Refusal(key.path, f"{why}; set that, or leave this out")


def _unmet(config: RunConfig, key: Key) -> str:
    """What `key` needs and does not have, as "needs a = 1"; "" for a key that is read."""
    for group in key.needs:
        met = [each for each in group if _holds(config, each)]
        if not met:
            return f"needs {' or '.join(_in_words(each) for each in group)}"
        # Where what it needs is itself not read, its own reason is the reason.
        reasons = [_unmet(config, keys()[each.partition(" ")[0]]) for each in met]
        if all(reasons):
            return reasons[0]
    return ""


def _holds(config: RunConfig, condition: str) -> bool:
    path, _, rest = condition.partition(" ")
    value = attrgetter(path)(config)
    relation, _, text = rest.partition(" ")
    if not relation:
        return bool(value)
    wanted = parse_value(text)
    return bool(value > wanted if relation == ">" else value == wanted)


def _in_words(condition: str) -> str:
    return (
        f"{condition} = true"
        if condition in keys() and keys()[condition].type is bool
        else condition
    )


def _check_schedule(config: RunConfig) -> Iterator[Refusal]:
    """Yield a `Refusal` where training outlasts the learning-rate schedule."""
    total, steps = config.lr_scheduler.total_steps, config.training.steps
    if total is not None and total < steps:
        yield Refusal(
            "lr_scheduler.total_steps",
            f"must be at least training.steps = {steps}; past its end the learning rate is "
            "undefined",
        )


def _check_who_decides(config: RunConfig) -> Iterator[Refusal]:
    """What is computed again has one owner: each dispatcher its section."""
    mode = config.activation_checkpoint.mode
    if config.relay.dispatcher == "relay":
        if mode != "none":
            yield Refusal(
                "activation_checkpoint.mode",
                'must be "none" with relay.dispatcher = "relay", where [attention_retention] '
                "decides what is computed again; leave it out",
            )
        return
    compiles = config.compile.enable and "model" in config.compile.components
    if mode == "memory_budget" and not compiles:
        yield Refusal(
            "activation_checkpoint.mode",
            'needs compile.enable = true with "model" in compile.components; '
            'or use "none", "selective" or "full"',
        )


def _check_retention(config: RunConfig) -> Iterator[Refusal]:
    """Levels are chosen in one way, and a budget has somebody who spends it."""
    retention, num_layers = config.attention_retention, config.model.num_layers
    if retention.layers is not None and len(retention.layers) != num_layers:
        yield Refusal(
            "attention_retention.layers",
            f"must have a level for each of model.num_layers = {num_layers}, not "
            f'{len(retention.layers)}; one level for all is mode = "full" and the like',
        )
    if retention.layers is not None and retention.mode != "recompute":
        yield Refusal(
            "attention_retention.mode", "attention_retention.layers is given too; give one of them"
        )
    if (retention.block_inputs == "device") != (retention.host_budget_gib is None):
        yield Refusal(
            "attention_retention.host_budget_gib",
            'goes together with attention_retention.block_inputs = "host" or "auto"; give both or '
            "neither",
        )


def _check_debug(config: RunConfig) -> Iterator[Refusal]:
    """Yield a `Refusal` for a promise that nothing would keep."""
    if config.relay.deterministic and config.relay.dispatcher != "relay":
        yield Refusal(
            "relay.deterministic", 'needs relay.dispatcher = "relay"; use debug.deterministic'
        )
    if conflict := config.relay.conflict():
        key, needs = conflict
        yield Refusal(f"relay.{key}", f"needs relay.{needs}; leave it out")


def _check_reporting(config: RunConfig, *, files: bool) -> Iterator[Refusal]:
    """Yield a `Refusal` for a report that is to be written and whose package is not installed."""
    for key, wanted, package in (
        ("metrics.enable_tensorboard", config.metrics.enable_tensorboard, "tensorboard"),
        ("metrics.enable_wandb", config.metrics.enable_wandb, "wandb"),
    ):
        if files and wanted and importlib.util.find_spec(package) is None:
            yield Refusal(key, f"the package {package} is not installed; install it, or use false")


def _check_profiler(config: RunConfig) -> Iterator[Refusal]:
    """Yield a `Refusal` for a profiling cycle too short for its warm-up and recording."""
    profiler = config.profiler
    needed = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < needed:
        yield Refusal(
            "profiler.profile_freq",
            f"must be at least profiler_warmup + profiler_active = {profiler.profiler_warmup} + "
            f"{profiler.profiler_active} = {needed}",
        )


def _check_checkpoint(config: RunConfig, *, files: bool) -> Iterator[Refusal]:
    """Yield a `Refusal` for checkpoint keys that contradict each other."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        yield Refusal(
            "checkpoint.initial_load_model_only",
            "a Hugging Face checkpoint holds only the model; use true",
        )
    if checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        yield Refusal(
            "checkpoint.last_save_model_only",
            "checkpoint.last_save_in_hf = true writes only the model; use true",
        )
    if checkpoint.load_only and checkpoint.enable_first_step_checkpoint:
        yield Refusal(
            "checkpoint.enable_first_step_checkpoint",
            "checkpoint.load_only = true saves nothing; use false",
        )
    yield from _check_initial_path(config, files=files)


def _check_initial_path(config: RunConfig, *, files: bool) -> Iterator[Refusal]:
    given = config.checkpoint.initial_load_path
    if given is None:
        return
    remote = "://" in given
    if remote and config.checkpoint.initial_load_in_hf:
        yield Refusal(
            "checkpoint.initial_load_path", "a Hugging Face checkpoint must be in a local folder"
        )
    if remote:
        return
    if not Path(given).is_absolute():
        yield Refusal(
            "checkpoint.initial_load_path",
            f'must be an absolute path; write "{Path.cwd() / given}"',
        )
    if files and not Path(given).is_dir():
        yield Refusal("checkpoint.initial_load_path", "no such folder")
