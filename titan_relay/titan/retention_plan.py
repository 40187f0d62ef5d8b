"""From `[attention_retention]` to the level of every layer, in bytes and estimated time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan.tools.logging import logger

from titan_relay.config import RunConfig, degrees_of
from titan_relay.config.degrees import Degrees
from titan_relay.memory.retention import (
    LayerCost,
    Level,
    RetentionPlan,
    plan_retention,
    retention_of,
)
from titan_relay.titan.retention import AttentionShape, Levels

_MIB, _GIB = 2**20, 2**30
_LSE_BYTES = 4  # the log-sum-exp is float32


@dataclass(frozen=True)
class Microbatch:
    """What one microbatch is to a layer of this rank."""

    num_rows: int
    seq_len: int
    cp: int
    tp: int
    itemsize: int
    num_alive: int  # microbatches between their forward and backward at most

    @property
    def num_tokens(self) -> int:
        """Queries of this rank."""
        return self.num_rows * self.seq_len // self.cp


def microbatch_of(run: RunConfig, degrees: Degrees, itemsize: int) -> Microbatch:
    """The microbatches of a run whose layers compute with elements of `itemsize` bytes."""
    local, rows, num_alive = run.training.local_batch_size, run.training.local_batch_size, 1
    if degrees.pp > 1:
        rows = run.parallelism.pipeline_parallel_microbatch_size
        num_alive = local // rows
        if run.parallelism.pipeline_parallel_schedule == "1F1B":
            # The first stage has one in flight for every stage; the others have fewer.
            num_alive = min(num_alive, degrees.pp)
    return Microbatch(
        num_rows=rows,
        seq_len=run.training.seq_len,
        cp=degrees.cp,
        tp=degrees.tp,
        itemsize=itemsize,
        num_alive=num_alive,
    )


def layer_costs(shapes: Mapping[int, AttentionShape], microbatch: Microbatch) -> list[LayerCost]:
    """Bytes and time of every layer's levels; time in multiply-adds, at one rate for all."""
    m = microbatch
    return [
        LayerCost(
            layer=layer,
            output_bytes=m.num_tokens
            * (shape.out_features * m.itemsize + shape.num_heads * _LSE_BYTES)
            // m.tp,
            # Scores and their product with the values, half of each masked.
            output_seconds=m.num_tokens * m.seq_len * shape.out_features / m.tp,
            full_bytes=m.num_tokens * shape.projected_features * m.itemsize // m.tp,
            full_seconds=m.num_tokens * shape.projection_weights / m.tp,
        )
        for layer, shape in sorted(shapes.items())
    ]


def choose_levels(run: RunConfig, world_size: int, levels: Levels, itemsize: int) -> RetentionPlan:
    """Set the levels of this rank's layers as the configuration says, and log what is kept."""
    section = run.attention_retention
    microbatch = microbatch_of(run, degrees_of(run, world_size), itemsize)
    costs = layer_costs(levels.shapes, microbatch)
    if section.mode == "auto":
        assert section.budget_gib is not None
        plan = plan_retention(costs, section.budget_gib * _GIB, microbatch.num_alive)
    else:
        given: dict[int, Level] = {
            cost.layer: section.layers[cost.layer] if section.layers is not None else section.mode
            for cost in costs
        }
        plan = retention_of(costs, given, microbatch.num_alive)
    levels.of_layer.update(plan.levels)
    log_plan(plan)
    log_block_inputs(run, microbatch, len(costs))
    return plan


def log_block_inputs(run: RunConfig, microbatch: Microbatch, num_layers: int) -> None:
    """Say how many of this rank's block inputs have room on the host."""
    if run.attention_retention.host_budget_gib is None:
        return
    tp = microbatch.tp if run.parallelism.enable_sequence_parallel else 1
    unit_bytes = microbatch.num_tokens // tp * run.model.dim * microbatch.itemsize
    wanted = num_layers * microbatch.num_alive
    fitting = min(wanted, int(run.attention_retention.host_budget_gib * _GIB / unit_bytes))
    logger.info(
        f"Block inputs in host memory: {fitting} of {wanted}, {fitting * unit_bytes / _MIB:.2f} MiB"
    )


def log_plan(plan: RetentionPlan) -> None:
    """Say what is kept, in a form that can be given as `attention_retention.layers`."""
    counts = ", ".join(
        f"{plan.count(level)} {level}"
        for level in ("recompute", "output", "full")
        if plan.count(level)
    )
    logger.info(f"Attention kept for backward: {plan.num_bytes / _MIB:.2f} MiB; layers: {counts}")
    if len(set(plan.levels.values())) > 1:
        listed = ", ".join(f'"{level}"' for _, level in sorted(plan.levels.items()))
        logger.info(f"The same again: attention_retention.layers = [{listed}]")


def plan_curves(plan: RetentionPlan) -> dict[str, float]:
    """The plan as numbers for TensorBoard."""
    return {
        "retention/plan/bytes": float(plan.num_bytes),
        **{
            f"retention/plan/layers_{level}": float(plan.count(level))
            for level in ("recompute", "output", "full")
        },
    }
