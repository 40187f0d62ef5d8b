"""What a run will be like once `[attention_retention]` has decided by the memory that is left."""

from __future__ import annotations

from dataclasses import replace

from torchtitan.config import TORCH_DTYPE_MAP

from titan_relay.config import RunConfig, degrees_of
from titan_relay.measure.step_memory import StepMemory
from titan_relay.titan.recompute.cost import block_input_bytes, microbatch_of
from titan_relay.units import GIB


def settled(
    run: RunConfig, world_size: int, start: StepMemory, usable_bytes: float
) -> RunConfig | None:
    """The run with numbers in the place of "auto"; None if it stays as it starts.

    Args:
        start: a step before the decision: nothing of attention is kept, and block inputs are on
            the host.
        usable_bytes: what tensors may have of the device once `safety_margin` is left free.
    """
    retention = run.attention_retention
    spends = retention.mode == "auto" and retention.budget_gib == "auto"
    takes_back = retention.block_inputs == "auto" and start.host_bytes > 0
    left_bytes = int(usable_bytes) - start.steady.live_bytes
    if run.relay.dispatcher != "relay" or not (spends or takes_back) or left_bytes <= 0:
        return None
    if takes_back:
        itemsize = TORCH_DTYPE_MAP[run.training.mixed_precision_param].itemsize
        microbatch = microbatch_of(run, degrees_of(run, world_size), itemsize)
        unit_bytes = block_input_bytes(run, microbatch)
        back_bytes = min(start.host_bytes, left_bytes // unit_bytes * unit_bytes)
        left_bytes -= back_bytes
        host_gib = (start.host_bytes - back_bytes) / GIB
        retention = replace(
            retention,
            block_inputs="host" if host_gib else "device",
            host_budget_gib=host_gib or None,
        )
    if spends:
        retention = replace(retention, budget_gib=left_bytes / GIB)
    return replace(run, attention_retention=retention)
