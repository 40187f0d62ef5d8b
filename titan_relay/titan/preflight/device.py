"""What a valid configuration may ask for that this machine's device cannot do."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from titan_relay.config import ConfigError, Origins, RunConfig
from titan_relay.config.errors import Refusal, either
from titan_relay.config.suggest import nearest
from titan_relay.moe import KernelChoiceError, uses_triton

_FLEX_BLOCK = 128  # FlexAttention's block; context parallelism cuts rows into whole blocks


def check_device(run: RunConfig, origins: Origins, *, cpu: bool) -> None:
    """Refuse what the device (the CPU or this machine's GPUs) cannot do, before anything is built.

    Raises:
        ConfigError: one line with the key, the value and the fix.
    """
    _check_kernels(run, origins, torch.device("cpu" if cpu else "cuda"))
    origins.refuse(run, _check_compiler(run))
    if cpu:
        origins.refuse(run, _check_cpu(run))
        return
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_devices = torch.accelerator.device_count()
    if num_ranks > num_devices:
        raise ConfigError(
            f"{num_ranks} ranks were started on this machine, which has {num_devices} GPUs: "
            f'start {num_devices}, or train on CPU with CUDA_VISIBLE_DEVICES=""'
        )
    cp, seq_len = run.parallelism.context_parallel_degree, run.training.seq_len
    if cp > 1 and seq_len % (cp * _FLEX_BLOCK):
        nearest = max(1, round(seq_len / (cp * _FLEX_BLOCK))) * cp * _FLEX_BLOCK
        raise origins.error(
            "training.seq_len",
            seq_len,
            f"FlexAttention under context_parallel_degree = {cp} needs a multiple of "
            f"{cp} * {_FLEX_BLOCK}, such as {nearest}",
        )


def _check_kernels(run: RunConfig, origins: Origins, device: torch.device) -> None:
    """Ask for a choice of kernels as the layers will."""
    try:
        uses_triton(run.relay.kernels, device, torch.float32)
    except KernelChoiceError as error:
        reason = str(error).removeprefix(f'kernels = "{run.relay.kernels}" ')
        raise origins.error("relay.kernels", run.relay.kernels, reason) from error


def _check_compiler(run: RunConfig) -> Iterator[Refusal]:
    """Yield a `Refusal` of a backend that this installation of torch does not have."""
    backend = run.compile.backend
    if run.compile.enable and backend not in torch.compiler.list_backends(exclude_tags=()):
        known = torch.compiler.list_backends()
        close = nearest(backend, known)
        fix = f"did you mean {close}?" if close else f"torch here has {either(known)}"
        yield Refusal("compile.backend", f"no such backend; {fix}")


def _check_cpu(run: RunConfig) -> Iterator[Refusal]:
    """Yield a `Refusal` for what needs an accelerator."""
    balancer = run.parallelism.context_parallel_load_balancer
    if run.parallelism.context_parallel_degree > 1 and balancer == "ptrr":
        fix = 'needs FlexAttention, which does not train on CPU; use "headtail" or "none"'
        yield Refusal("parallelism.context_parallel_load_balancer", fix)
    if run.training.enable_cpu_offload:
        fix = "this machine trains on CPU, where there is nothing to offload; use false"
        yield Refusal("training.enable_cpu_offload", fix)
    if run.checkpoint.enable and run.checkpoint.async_mode == "async_with_pinned_mem":
        fix = 'needs an accelerator; use "async" or "disabled" on CPU'
        yield Refusal("checkpoint.async_mode", fix)
    if run.profiler.enable_memory_snapshot:
        fix = "records an accelerator's allocator; use false on CPU"
        yield Refusal("profiler.enable_memory_snapshot", fix)
    if run.training.gc_debug:
        yield Refusal("training.gc_debug", "records CUDA tensors only; use false on CPU")
    if run.training.dtype != "float32":
        fix = 'this machine trains on CPU, which computes in float32; use "float32"'
        yield Refusal("training.dtype", fix)
