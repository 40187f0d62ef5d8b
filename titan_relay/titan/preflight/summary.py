"""What a run is, said once at its start: layout, experts' way, and what has which precision."""

from __future__ import annotations

from torchtitan.tools.logging import logger

from titan_relay.config import RunConfig, degrees_of
from titan_relay.titan.device import on_cpu
from titan_relay.titan.train.relay_setup import expected_relay, unused_keys


def summary_lines(run: RunConfig, world_size: int) -> list[str]:
    """The start-up summary, one line a topic."""
    degrees = degrees_of(run, world_size)
    t, moe = run.training, run.model.moe
    compute = "float32" if on_cpu() else t.mixed_precision_param
    ring = (
        f"{run.relay.grad_dtype} expert gradients on the ring"
        if run.relay.dispatcher == "relay"
        else "no ring"
    )
    expected = expected_relay(run, world_size)
    unused = unused_keys(run, world_size)
    without = f"expert parallelism {degrees.ep}, dispatcher {run.relay.dispatcher}"
    return [
        f"Model: {run.model.family}, {run.model.num_layers} layers of {moe.num_experts} experts, "
        f"top-{moe.top_k}; sequences of {t.seq_len} tokens",
        f"Layout: {world_size} rank(s) on {'CPU' if on_cpu() else 'CUDA'}: "
        f"dp_replicate {degrees.dp_replicate}, dp_shard {degrees.dp_shard}, "
        f"cp {degrees.cp}, tp {degrees.tp}, "
        f"pp {degrees.pp}, ep {degrees.ep} "
        f"through {run.relay.dispatcher}",
        f"Precision: {t.dtype} parameters and optimizer state, {compute} computation, "
        f"{t.mixed_precision_reduce} gradient reductions, float32 router, losses and balancing, "
        f"{ring}",
        *(expected.lines() if expected is not None else []),
        *([f"Without effect here ({without}): {', '.join(unused)}"] if unused else []),
        f"Output: {run.dump_folder}",
    ]


def log_summary(run: RunConfig, world_size: int) -> None:
    """Log the start-up summary."""
    for line in summary_lines(run, world_size):
        logger.info(line)
