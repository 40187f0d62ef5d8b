"""One rank of many on fake tensors: no memory, no other process, any machine.

What torchtitan computes from real values while it sets up runs outside the fake mode. Traced on
fake *CPU* tensors: autograd on fake CUDA tensors aborts in a build of torch without CUDA. Numbers
that are read back are 0: a step reads counts for reports and faults; what shapes depend on,
`dry_trainer` supplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from titan_relay.measure.devices import Device
from titan_relay.moe import fake_device
from titan_relay.private_torch import ReadableFakeTensors, init_fake_ranks
from titan_relay.titan.private_torchtitan import set_up_outside_fake


@contextmanager
def fake_ranks(world_size: int, rank: int, device: Device) -> Iterator[None]:
    """Be rank `rank` of `world_size` with the fake backend, on fake tensors, as on `device`.

    Raises:
        RuntimeError: this process is in a process group already.
    """
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
