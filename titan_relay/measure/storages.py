"""From tensors, modules and optimizers to the plain tensors that own storages.

A wrapper subclass (a DTensor, for one) has no memory of its own and reports its *global* size, so
only the tensors inside it are looked at.

Host memory may stand in for device memory. On a machine without a device both are the same memory,
so bytes say themselves which they are: what is allocated inside `host_allocation` is the host's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from torch.optim import Optimizer

from titan_relay.private_torch import fake_mode_is_on

_allocates_on_host: ContextVar[bool] = ContextVar("titan_relay_host_allocation", default=False)

Trackable = torch.Tensor | nn.Module | Optimizer | Mapping | list | tuple | set


def is_wrapper(tensor_type: type) -> bool:
    """Whether tensors of this type only wrap others (they can name them: `__tensor_flatten__`)."""
    return hasattr(tensor_type, "__tensor_flatten__")


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or, for a wrapper subclass, the tensors inside it."""
    if not is_wrapper(type(tensor)):
        yield tensor
        return
    inner_names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in inner_names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):  # a DTensor also names its mesh
            yield from plain_tensors(inner)


def tensors_of(owner: Trackable) -> Iterator[torch.Tensor]:
    """Every plain tensor that `owner` holds.

    A module gives its parameters, their gradients and its buffers; an optimizer its state; a
    mapping, list, tuple or set whatever its members give. Other values hold no tensors.
    """
    if isinstance(owner, torch.Tensor):
        yield from plain_tensors(owner)
        if owner.is_leaf and owner.grad is not None:
            yield from plain_tensors(owner.grad)
    elif isinstance(owner, nn.Module):
        yield from tensors_of([*owner.parameters(), *owner.buffers()])
    elif isinstance(owner, Optimizer):
        yield from tensors_of(list(owner.state.values()))
    elif isinstance(owner, Mapping):
        yield from tensors_of(list(owner.values()))
    elif isinstance(owner, list | tuple | set):
        for value in owner:
            yield from tensors_of(value)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has one storage with memory behind it.

    Tensors on the meta device have none; fake tensors do count, as the device they stand for.
    Sparse and opaque layouts keep their data in tensors of their own.
    """
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def storage_has_memory(storage: torch.UntypedStorage) -> bool:
    """Like `has_storage`, when only the storage is at hand.

    The storages of fake tensors are on the meta device, so there the question is whether fake
    tensors are being computed with at the moment.
    """
    return storage.device.type != "meta" or fake_mode_is_on()


@contextmanager
def host_allocation() -> Iterator[None]:
    """Tensors made inside are host memory, whatever the device."""
    token = _allocates_on_host.set(True)
    try:
        yield
    finally:
        _allocates_on_host.reset(token)


def allocates_on_host() -> bool:
    """Whether a tensor made now is host memory."""
    return _allocates_on_host.get()
