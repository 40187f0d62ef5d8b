"""What a layer's levels cost and save in this run, and what its block's input takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from titan_relay.config import RunConfig
from titan_relay.config.degrees import Degrees, microbatch_rows
from titan_relay.recompute.levels import LayerCost
from titan_relay.titan.recompute.block_levels import AttentionShape

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
    rows = microbatch_rows(run, degrees)
    num_alive = run.training.local_batch_size // rows  # 1 without a pipeline
    if degrees.pp > 1 and run.parallelism.pipeline_parallel_schedule == "1F1B":
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


@dataclass(frozen=True)
class Seconds:
    """Measured time of one layer's attention kernel and projections, for one microbatch."""

    kernel: float
    projections: float


def layer_costs(
    shapes: Mapping[int, AttentionShape], microbatch: Microbatch, measured: Seconds | None = None
) -> list[LayerCost]:
    """Bytes and time of every layer's levels.

    Without a measurement time is multiply-adds, at one rate for all, which orders the levels.
    """
    m = microbatch
    costs = [
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
    if measured is None:
        return costs
    return [
        replace(cost, output_seconds=measured.kernel, full_seconds=measured.projections)
        for cost in costs
    ]


def block_input_bytes(run: RunConfig, microbatch: Microbatch) -> int:
    """One block's input, of one microbatch on this rank."""
    tp = microbatch.tp if run.parallelism.enable_sequence_parallel else 1
    return microbatch.num_tokens // tp * run.model.dim * microbatch.itemsize
