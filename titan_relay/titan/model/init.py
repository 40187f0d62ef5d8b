"""Initial weights as a function of run seed, parameter name and global index only.

DTensor's random-number tracker does not exist on CPU: there each rank fills its shard from the same
seed, so shards repeat across ranks and no loss curve shows it. Here every element is computed from
a counter (its index in the whole parameter), so weights are the same for any number of ranks, any
degrees and any device, and no rank ever generates more than its own shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn

from titan_relay.private_torch import local_block
from titan_relay.titan.model.random_numbers import counter_normal, key_of

_CHUNK_ELEMENTS = 1 << 22  # bounds the temporaries to a few dozen MiB per parameter


def parameter_key(seed: int, name: str) -> int:
    """A 64-bit key for one parameter of one run."""
    return key_of(f"{seed}/{name}")


def _local_block(param: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """This rank's part of `param`, the whole shape, and where the part starts in it."""
    if not isinstance(param, DTensor):
        return param, tuple(param.shape), (0,) * param.ndim
    local = param.to_local()
    shape, offset = local_block(param)
    assert tuple(local.shape) == shape, (local.shape, shape)
    return local, tuple(param.shape), offset


def global_index(
    flat: torch.Tensor,
    local_shape: tuple[int, ...],
    shape: tuple[int, ...],
    offset: tuple[int, ...],
) -> torch.Tensor:
    """Index in the whole tensor of each flat index into the local block."""
    index = torch.zeros_like(flat)
    stride = 1
    for dim in reversed(range(len(shape))):
        index += (flat % local_shape[dim] + offset[dim]) * stride
        flat = flat // local_shape[dim]
        stride *= shape[dim]
    return index


@torch.no_grad()
def fill_normal(param: torch.Tensor, *, key: int, std: float) -> None:
    """Fill `param` (a tensor or DTensor, any dtype) with normals of its global indices."""
    local, shape, offset = _local_block(param)
    if local.numel() == 0:
        return
    values = local.contiguous()  # itself, or a copy to write from
    flat_values = values.view(-1)
    for start in range(0, local.numel(), _CHUNK_ELEMENTS):
        stop = min(start + _CHUNK_ELEMENTS, local.numel())
        flat = torch.arange(start, stop, dtype=torch.int64, device=local.device)
        index = global_index(flat, tuple(local.shape), shape, offset)
        flat_values[start:stop] = counter_normal(index, key, std).to(local.dtype)
    if values is not local:
        local.copy_(values)


@dataclass(frozen=True)
class Normal:
    """Marks a parameter as normal with this standard deviation.

    torchtitan calls `param_init` functions without a name, so this only carries the number;
    `init_by_name` does the work once the whole model, and with it every name, is there.
    """

    std: float

    def __call__(self, param: nn.Parameter) -> None:
        param.normal_init_std = self.std  # type: ignore[attr-defined]


def init_by_name(model: nn.Module, *, seed: int) -> None:
    """Fill every parameter that was marked by `Normal`.

    Names are canonical (without what a checkpointing wrapper adds), so that weights do not depend
    on activation checkpointing.
    """
    for name, param in model.named_parameters():
        std = getattr(param, "normal_init_std", None)
        if std is not None:
            fill_normal(param, key=parameter_key(seed, canonical_fqn(name)), std=std)
