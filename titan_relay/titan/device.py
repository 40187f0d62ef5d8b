"""The device that a process trains on, and what FSDP needs where that is the CPU.

torchtitan assumes an accelerator; how it is made to do without is in `private_torchtitan`, and the
attention that runs on CPU in `model.attention`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_relay.measure.devices import CPU, Device


def on_cpu() -> bool:
    """Whether this process trains on CPU: torch sees no accelerator."""
    return not torch.accelerator.is_available()


def this_device() -> Device:
    """The device that this process trains on."""
    if on_cpu():
        return Device(CPU, None)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(properties.name, properties.total_memory)


def sum_gradients_without_premul(model: nn.Module) -> None:
    """Make FSDP2 reduce with a plain sum.

    FSDP2 divides gradients inside the collective (PREMUL_SUM), which gloo does not have. The
    trainer turns gradient division off anyway, so a plain sum is the same arithmetic.
    """
    if not on_cpu():
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
