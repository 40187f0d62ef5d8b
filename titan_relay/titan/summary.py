"""What a run is, said once at its start: layout, experts' way, and what has which precision."""

from __future__ import annotations

from torchtitan.tools.logging import logger

from titan_relay.config.schema import RunConfig
from titan_relay.titan import cpu


def summary_lines(run: RunConfig, world_size: int) -> list[str]:
    """The start-up summary, one line a topic."""
    p, t, moe = run.parallelism, run.training, run.model.moe
    compute = "float32" if cpu.on_cpu() else t.mixed_precision_param
    ring = (
        f"{run.relay.grad_dtype} expert gradients on the ring"
        if run.relay.dispatcher == "relay"
        else "no ring"
    )
    return [
        f"Model: {run.model.family}, {run.model.num_layers} layers of {moe.num_experts} experts, "
        f"top-{moe.top_k}; sequences of {t.seq_len} tokens",
        f"Layout: {world_size} rank(s) on {'CPU' if cpu.on_cpu() else 'CUDA'}: "
        f"dp_replicate {p.data_parallel_replicate_degree}, dp_shard {p.data_parallel_shard_degree}, "
        f"cp {p.context_parallel_degree}, tp {p.tensor_parallel_degree}, "
        f"pp {p.pipeline_parallel_degree}, ep {p.expert_parallel_degree} "
        f"through {run.relay.dispatcher}",
        f"Precision: {t.dtype} parameters and optimizer state, {compute} computation, "
        f"{t.mixed_precision_reduce} gradient reductions, float32 router, losses and balancing, "
        f"{ring}",
        f"Output: {run.dump_folder}",
    ]


def log_summary(run: RunConfig, world_size: int) -> None:
    """Log the start-up summary."""
    for line in summary_lines(run, world_size):
        logger.info(line)
