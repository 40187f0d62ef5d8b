"""From our `RunConfig` to torchtitan's `Trainer.Config`: one function per section.

Sections and keys carry torchtitan's names; what differs in name is said in `docs/config.md`.
"""

from __future__ import annotations

import sys
from typing import Any

from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.config import configs as titan
from torchtitan.config.override import OverrideConfig
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.profiler import Profiler

from titan_relay.config import degrees_of
from titan_relay.config.check import schedule_steps
from titan_relay.config.degrees import global_batch_size, loss_chunks
from titan_relay.config.schema import DataConfig, RunConfig
from titan_relay.titan.device import on_cpu
from titan_relay.titan.metrics.processor import RelayMetricsProcessor
from titan_relay.titan.model.families import FAMILIES, build_model_config
from titan_relay.titan.recompute.activation_checkpoint import build_activation_checkpoint
from titan_relay.titan.recompute.block_levels import BlockRetention
from titan_relay.titan.train.checkpoint import RelayCheckpointManager
from titan_relay.titan.train.dataloader import RelayDataLoader, RelayTokenizer
from titan_relay.titan.train.parallelize import parallelize
from titan_relay.titan.train.pipeline import pipeline
from titan_relay.titan.train.relay_setup import relay_options
from titan_relay.titan.train.trainer import RelayTrainer
from titan_relay.titan.train.validator import RelayValidator
from titan_relay.units import GIB

_OURS = ("print_config", "check_finite")  # keys of [debug] that torchtitan does not act on


def build_trainer_config(
    run: RunConfig, world_size: int, *, compute_in_float32: bool | None = None
) -> RelayTrainer.Config:
    """The torchtitan configuration of a run that `validate` and `check_device` let pass.

    compute_in_float32: whatever `training.mixed_precision_param` says. None: on CPU, where
    bfloat16 is slower and less exact.
    """
    in_float32 = on_cpu() if compute_in_float32 is None else compute_in_float32
    rows = global_batch_size(run, world_size)
    return RelayTrainer.Config(
        run=run,
        dump_folder=run.dump_folder,
        hf_assets_path="",
        model_spec=_model_spec(run),
        training=_training(run, rows, in_float32),
        parallelism=_parallelism(run),
        optimizer=_optimizer(run),
        lr_scheduler=_lr_scheduler(run),
        checkpoint=_checkpoint(run),
        activation_checkpoint=_recompute(run),
        compile=titan.CompileConfig(
            enable=run.compile.enable,
            components=list(run.compile.components),
            backend=run.compile.backend,
        ),
        comm=titan.CommConfig(**_fields(run.comm)),
        profiler=Profiler.Config(**_fields(run.profiler)),
        debug=titan.DebugConfig(
            **{k: v for k, v in _fields(run.debug).items() if k not in _OURS},
            enable_structured_logging=False,
        ),
        metrics=_metrics(run),
        loss=_loss(run, world_size),
        tokenizer=RelayTokenizer.Config(settings=run.tokenizer),
        dataloader=_dataloader(run.data, run, rows),
        validator=_validator(run, rows, world_size),
        override=OverrideConfig(imports=_overrides(run)),
    )


def _fields(section: Any) -> dict[str, Any]:
    """A section whose keys are exactly torchtitan's; tuples become the lists torchtitan has."""
    return {name: _as_lists(getattr(section, name)) for name in section.__dataclass_fields__}


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def _model_spec(run: RunConfig) -> ModelSpec:
    family = FAMILIES[run.model.family]
    return ModelSpec(
        name=run.model.family,
        flavor="toml",
        model=build_model_config(run.model, seed=run.debug.seed, cpu=on_cpu()),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline,
        post_optimizer_build_fn=None,  # the trainer's BalanceStep takes its place
        state_dict_adapter=family.adapter,
    )


def _recompute(run: RunConfig) -> Any:
    if run.relay.dispatcher == "relay":
        host_gib = run.attention_retention.host_budget_gib or 0.0
        return BlockRetention.Config(host_budget_bytes=int(host_gib * GIB))
    return build_activation_checkpoint(run.activation_checkpoint)


def _training(run: RunConfig, rows: int, in_float32: bool) -> titan.TrainingConfig:
    values = _fields(run.training)
    for ours in ("cpu_threads_per_rank", "max_minutes", "max_skipped_steps"):
        del values[ours]
    if in_float32:
        values["mixed_precision_param"] = "float32"
    values["global_batch_size"] = rows
    # The relay and the all-to-all read routing counts on the host, which a CUDA graph cannot.
    return titan.TrainingConfig(**values, disable_cuda_graphs=True)


def _parallelism(run: RunConfig) -> titan.ParallelismConfig:
    values = _fields(run.parallelism)
    balancer = values.pop("context_parallel_load_balancer")
    return titan.ParallelismConfig(
        **values,
        context_parallel_load_balancer=None if balancer == "none" else balancer,
        # The other backends need torch >= 2.14 or DTensors everywhere.
        spmd_backend="partial_dtensor",
    )


def _optimizer(run: RunConfig) -> OptimizersContainer.Config:
    o = run.optimizer
    return OptimizersContainer.Config(
        implementation=o.implementation,
        param_groups=[
            ParamGroupConfig(
                pattern=".*",
                optimizer_name=o.name,
                optimizer_kwargs={
                    "lr": o.lr,
                    "betas": (o.beta1, o.beta2),
                    "eps": o.eps,
                    "weight_decay": o.weight_decay,
                },
            )
        ],
    )


def _lr_scheduler(run: RunConfig) -> LRSchedulersContainer.Config:
    values = _fields(run.lr_scheduler)
    # torchtitan cuts a warm-up longer than the schedule too, with a warning of its own.
    values["warmup_steps"] = min(values["warmup_steps"], schedule_steps(run))
    return LRSchedulersContainer.Config(**values)


def _checkpoint(run: RunConfig) -> RelayCheckpointManager.Config:
    values = _fields(run.checkpoint)
    del values["on_save_error"]  # of our own
    # Without a path the key means nothing, and torchtitan warns of it at every start.
    values["initial_load_model_only"] &= run.checkpoint.initial_load_path is not None
    return RelayCheckpointManager.Config(**values, run=run)


def _metrics(run: RunConfig) -> RelayMetricsProcessor.Config:
    values = _fields(run.metrics)
    del values["plan"]  # the trainer's
    values["disable_color_printing"] |= not sys.stderr.isatty()
    compiled = run.compile.enable and "model" in run.compile.components
    return RelayMetricsProcessor.Config(
        **values, total_steps=run.training.steps, track_live_tensors=not compiled
    )


def _loss(run: RunConfig, world_size: int) -> BaseLoss.Config:
    if run.loss.name == "chunked_cross_entropy":
        return ChunkedLossWrapper.Config(num_chunks=loss_chunks(run, degrees_of(run, world_size)))
    return CrossEntropyLoss.Config()


def _dataloader(data: DataConfig, run: RunConfig, rows: int) -> RelayDataLoader.Config:
    return RelayDataLoader.Config(
        data=data, global_batch_size=rows, seed=run.debug.seed, infinite=data.infinite
    )


def _validator(run: RunConfig, rows: int, world_size: int) -> RelayValidator.Config:
    v = run.validator
    # torchtitan counts a rank's batches; a validation step here is a whole global batch, so that
    # it reads the same rows for any number of ranks.
    batches_per_step = rows // (run.training.local_batch_size * degrees_of(run, world_size).batch)
    return RelayValidator.Config(
        enable=v.enable,
        freq=v.freq,
        last_step=run.training.steps,
        steps=v.steps * batches_per_step if v.steps > 0 else -1,
        dataloader=_dataloader(v.data, run, rows),
    )


def _overrides(run: RunConfig) -> list[Any]:
    if run.relay.dispatcher == "alltoall":
        return ["titan_relay.titan.model.experts.native_dtype_experts"]
    options = relay_options(run)
    return [("titan_relay.titan.model.experts.relay_routed_experts", {"options": options})]
