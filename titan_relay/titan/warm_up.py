"""Have the relay's kernels compiled before step 1, so that no step waits for a compiler."""

from __future__ import annotations

import torch
from torchtitan.tools.logging import logger

from titan_relay.config import RunConfig
from titan_relay.moe import warm_up
from titan_relay.titan import cpu
from titan_relay.titan.relay_plan import relay_options, relay_shape


def warm_up_kernels(run: RunConfig, world_size: int, device: torch.device) -> None:
    """Compile, or load from Triton's cache, what every MoE layer launches; says how long it took.

    Does nothing where plain PyTorch computes the experts.
    """
    if run.relay.dispatcher != "relay":
        return
    shape = relay_shape(run, world_size, on_cpu=cpu.on_cpu())
    seconds = warm_up(shape, relay_options(run), device)
    if seconds > 0.0:
        logger.info(f"Relay kernels: ready before the first step, after {seconds:.1f} s")
