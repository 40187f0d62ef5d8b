"""Everything torchtitan needs to train on a machine without an accelerator, and why.

torchtitan 0.3 assumes an accelerator. Each function here is one adaptation; on a machine that has
an accelerator none of them does anything. The attention that runs on CPU is in `attention`.
"""

from __future__ import annotations

import math
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule

from titan_relay.moe import set_ring_timeout

if TYPE_CHECKING:  # imported for real only after the device is set, below
    from torchtitan.distributed import ParallelDims


def on_cpu() -> bool:
    """Whether this process trains on CPU: torch sees no accelerator."""
    return not torch.accelerator.is_available()


def adapt_torchtitan() -> None:
    """Make torchtitan use the CPU where there is no accelerator.

    `torchtitan.tools.utils` falls back to "cuda" when it finds no accelerator, and other modules
    copy `device_type`, `device_module` and `get_local_device` when they are imported, so this must
    run before them. `torch.cpu` lacks the memory functions of an accelerator module, but their only
    caller, the memory monitor, is replaced by `metrics`.

    On every device torchtitan's `set_pg_timeouts` is replaced, see `_set_process_group_timeouts`.
    """
    if on_cpu():
        import torchtitan.tools.utils as utils

        cpu_module: ModuleType = torch.cpu
        utils.device_type = "cpu"
        utils.device_module = cpu_module
        utils.get_local_device = _cpu_device
        utils.get_peak_flops = _no_peak_flops

    import torchtitan.distributed.utils as distributed_utils

    distributed_utils.set_pg_timeouts = _set_process_group_timeouts


def _cpu_device() -> torch.device:
    """This process's device. Without an index: DTensor refuses to mix `cpu` and `cpu:0`."""
    return torch.device("cpu")


def _no_peak_flops(device_name: str) -> float:
    """A CPU has no peak to compare with; torchtitan would assume that of an A100."""
    return math.nan


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


def _set_process_group_timeouts(timeout: timedelta, parallel_dims: ParallelDims) -> None:
    """Give every mesh's group, and the ring over the experts' group, the training timeout.

    torchtitan's own needs `torch.distributed.set_timeout` of torch 2.14, passes device ids to the
    barrier (gloo rejects them) and synchronises a device. The barrier keeps a fast rank from timing
    out on a slow one that is still in its first step.
    """
    dist.barrier(device_ids=None if on_cpu() else [torch.accelerator.current_device_index()])
    meshes = parallel_dims.get_all_one_dimensional_meshes().values()
    for group in [mesh.get_group() for mesh in meshes]:
        _set_pg_timeout(timeout, group)
        set_ring_timeout(group, timeout)
    _set_pg_timeout(timeout, None)
