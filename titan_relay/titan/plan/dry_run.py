"""One step of the real trainer on fake tensors, for one rank of many: no memory, no other process,
any machine.

What torchtitan computes from real values while it sets up runs outside the fake mode. Traced on
fake *CPU* tensors: autograd on fake CUDA tensors aborts in a build of torch without CUDA. Numbers
that are read back are 0: a step reads counts for reports and faults; what shapes depend on,
`dry_trainer` supplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from titan_relay.config import RunConfig, degrees_of
from titan_relay.config.degrees import global_batch_size
from titan_relay.measure.devices import Device
from titan_relay.measure.step_memory import StepMemory
from titan_relay.moe import fake_device
from titan_relay.private_torch import ReadableFakeTensors, init_fake_ranks
from titan_relay.titan.plan.dry_trainer import as_dry
from titan_relay.titan.plan.recorder import record_step
from titan_relay.titan.plan.synthetic import silenced, without_files
from titan_relay.titan.private_torchtitan import set_up_outside_fake
from titan_relay.titan.train.build import build_trainer_config

_MOST_MICROBATCHES = 2


def dry_run(
    run: RunConfig,
    world_size: int,
    device: Device,
    *,
    rank: int = 0,
    skew: float = 1.0,
    watch: Callable[[str], None] | None = None,
) -> StepMemory:
    """Every byte of one training step of rank `rank`, without a device or any other rank.

    A compiled run is planned as if it were not: a compiler needs no more. Of many accumulated
    microbatches two are run: the second has the first one's gradients beside it, like all others.

    Args:
        skew: rows that the all-to-all brings this rank, as a multiple of a balanced router's.
        watch: called with each phase of the step as it begins.

    Raises:
        RuntimeError: this process is in a process group already.
    """
    run = replace(_accumulating_twice(run, world_size), compile=replace(run.compile, enable=False))
    with silenced(), _fake_ranks(world_size, rank, device):
        config = build_trainer_config(run, world_size, compute_in_float32=device.is_cpu)
        dry = as_dry(without_files(config), stands_for_cuda=not device.is_cpu, skew=skew)
        trainer = dry.build()
        try:
            return record_step(trainer, watch)
        finally:
            trainer.close()


def _accumulating_twice(run: RunConfig, world_size: int) -> RunConfig:
    rows = run.training.local_batch_size * degrees_of(run, world_size).batch
    most = min(global_batch_size(run, world_size), _MOST_MICROBATCHES * rows)
    return replace(run, training=replace(run.training, global_batch_size=most))


@contextmanager
def _fake_ranks(world_size: int, rank: int, device: Device) -> Iterator[None]:
    """Be rank `rank` of `world_size` with the fake backend, on fake tensors, as on `device`."""
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without a process group")
    threads = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does
    init_fake_ranks(world_size, rank)
    try:
        with ExitStack() as stack:
            stack.enter_context(set_up_outside_fake())
            if not device.is_cpu:
                stack.enter_context(fake_device(torch.device("cuda")))
            stack.enter_context(ReadableFakeTensors())
            yield
    finally:
        dist.destroy_process_group()
        torch.autograd.set_multithreading_enabled(threads)
