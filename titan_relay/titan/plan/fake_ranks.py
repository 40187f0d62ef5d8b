"""One rank of many on fake tensors: no memory, no other process, any machine.

What torchtitan computes from real values while it sets up runs outside the fake mode; what a step
reads back from tensors is supplied. Traced on fake *CPU* tensors: autograd on fake CUDA tensors
aborts in a build of torch without CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as distributed_utils

from titan_relay.measure.devices import Device
from titan_relay.moe import fake_device
from titan_relay.titan.model import balance_hook, experts, init
from titan_relay.titan.plan.alltoall import Routing, rows_per_expert
from titan_relay.titan.plan.attention import flash_attention
from titan_relay.titan.plan.loss import few_chunks


@contextmanager
def fake_ranks(world_size: int, rank: int, routing: Routing, device: Device) -> Iterator[None]:
    """Be rank `rank` of `world_size` with the fake backend, on fake tensors, as on `device`.

    Raises:
        RuntimeError: this process is in a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without a process group")
    threads = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as stack:
            for owner, name in _FROM_REAL_VALUES:
                stack.enter_context(_replaced(owner, name, _outside(getattr(owner, name))))
            stack.enter_context(_replaced(init, "fill_normal", _fill_nothing))
            stack.enter_context(_replaced(balance_hook, "layers_present", _all_layers))
            stack.enter_context(_replaced(experts, "rows_per_expert", rows_per_expert))
            stack.enter_context(routing.supplied())
            stack.enter_context(few_chunks())
            if not device.is_cpu:
                stack.enter_context(fake_device(torch.device("cuda")))
                stack.enter_context(flash_attention())
                stack.enter_context(_replaced(experts, "has_grouped_gemm", _is_bfloat16))
            stack.enter_context(_FakeTensors(allow_non_fake_inputs=True))
            yield
    finally:
        dist.destroy_process_group()
        torch.autograd.set_multithreading_enabled(threads)


_FROM_REAL_VALUES = (
    (ParallelDims, "build_mesh"),
    (DeviceMesh, "__init__"),
    (distributed_utils, "set_determinism"),
)


_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class _FakeTensors(FakeTensorMode):
    """Fake tensors from which a number can be read back: it is 0.

    Those that a step reads are counts for reports and faults; what shapes depend on is supplied.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NO_KEYWORDS,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        return super().__torch_dispatch__(func, types, args, kwargs)


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


def _is_bfloat16(x_RD: torch.Tensor) -> bool:
    return x_RD.dtype == torch.bfloat16


def _fill_nothing(param: torch.Tensor, **unused: Any) -> None:
    """Initial values do not matter, and computing them would take most of the time."""


def _all_layers(table: torch.Tensor) -> list[int]:
    return list(range(table.shape[0]))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
