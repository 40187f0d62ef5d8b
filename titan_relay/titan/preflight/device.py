"""What a valid configuration may ask for that this machine's device cannot do."""

from __future__ import annotations

import os
from typing import Any

import torch

from titan_relay.config import ConfigError, RunConfig, Sources
from titan_relay.moe import KernelChoiceError, uses_triton

_FLEX_BLOCK = 128  # FlexAttention's block; context parallelism cuts rows into whole blocks


def check_device(run: RunConfig, sources: Sources, *, cpu: bool) -> None:
    """Refuse what the device (the CPU or this machine's GPUs) cannot do, before anything is built.

    Raises:
        ConfigError: one line with the key, the value and the fix.
    """
    _check_kernels(run, sources, torch.device("cpu" if cpu else "cuda"))
    if cpu:
        for key, value, fix in _cpu_faults(run):
            raise sources.error(key, value, fix)
        return
    num_ranks, num_devices = _local_ranks(), torch.accelerator.device_count()
    if num_ranks > num_devices:
        raise ConfigError(
            f"{num_ranks} ranks were started on this machine, which has {num_devices} GPUs: "
            f'start {num_devices}, or train on CPU with CUDA_VISIBLE_DEVICES=""'
        )
    cp, seq_len = run.parallelism.context_parallel_degree, run.training.seq_len
    if cp > 1 and seq_len % (cp * _FLEX_BLOCK):
        nearest = max(1, round(seq_len / (cp * _FLEX_BLOCK))) * cp * _FLEX_BLOCK
        raise sources.error(
            "training.seq_len",
            seq_len,
            f"FlexAttention under context_parallel_degree = {cp} needs a multiple of "
            f"{cp} * {_FLEX_BLOCK}, such as {nearest}",
        )


def _check_kernels(run: RunConfig, sources: Sources, device: torch.device) -> None:
    """Ask for a choice of kernels as the layers will."""
    try:
        uses_triton(run.relay.kernels, device, torch.float32)
    except KernelChoiceError as error:
        reason = str(error).removeprefix(f'kernels = "{run.relay.kernels}" ')
        raise sources.error("relay.kernels", run.relay.kernels, reason) from error


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _cpu_faults(run: RunConfig) -> list[tuple[str, Any, str]]:
    """Keys, values and fixes of what needs an accelerator."""
    balancer = run.parallelism.context_parallel_load_balancer
    faults: list[tuple[str, Any, str]] = []
    if run.parallelism.context_parallel_degree > 1 and balancer == "ptrr":
        fix = 'needs FlexAttention, which does not train on CPU; use "headtail" or "none"'
        faults.append(("parallelism.context_parallel_load_balancer", balancer, fix))
    if run.training.enable_cpu_offload:
        fix = "this machine trains on CPU, where there is nothing to offload; use false"
        faults.append(("training.enable_cpu_offload", True, fix))
    if run.checkpoint.enable and run.checkpoint.async_mode == "async_with_pinned_mem":
        fix = 'needs an accelerator; use "async" or "disabled" on CPU'
        faults.append(("checkpoint.async_mode", run.checkpoint.async_mode, fix))
    if run.profiler.enable_memory_snapshot:
        fix = "records an accelerator's allocator; use false on CPU"
        faults.append(("profiler.enable_memory_snapshot", True, fix))
    if run.training.gc_debug:
        faults.append(("training.gc_debug", True, "records CUDA tensors only; use false on CPU"))
    if run.training.dtype != "float32":
        fix = 'this machine trains on CPU, which computes in float32; use "float32"'
        faults.append(("training.dtype", run.training.dtype, fix))
    return faults
