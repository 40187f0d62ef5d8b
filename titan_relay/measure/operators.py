"""What the live-bytes tracker has to know of operators and of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

# Their kernels are C++, so there is nothing of ours to see inside.
_BUILTIN_NAMESPACES = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler"})
# Operators that may give a storage another size, besides every out= variant.
_RESIZING_OPS = frozenset(
    {"aten::resize_", "aten::resize_as_", "aten::set_", "inductor::resize_storage_bytes_"}
)


class OpTraits(NamedTuple):
    """What has to be known of an operator, looked up once."""

    name: str
    runs_python: bool
    may_resize: bool
    may_alias: bool
    out_names: tuple[str, ...]


def traits_of(func: Any) -> OpTraits:
    """Classify an operator; higher-order operators have neither schema nor dispatcher entry."""
    if not isinstance(func, OpOverload):
        return OpTraits(str(func), False, False, may_alias=True, out_names=())
    qualified_name = func._schema.name
    out_names = tuple(argument.name for argument in func._schema.arguments if argument.is_out)
    returns_fresh = all(result.alias_info is None for result in func._schema.returns)
    return OpTraits(
        name=str(func),
        runs_python=func.namespace not in _BUILTIN_NAMESPACES,
        may_resize=bool(out_names) or qualified_name in _RESIZING_OPS,
        # Only these schemas are known to be right about it.
        may_alias=not (returns_fresh and func.namespace == "aten"),
        out_names=out_names,
    )


def keys_below(args: tuple, kwargs: dict) -> DispatchKeySet:
    """Where an operator goes on below this mode: to the next mode, else to its device's kernel."""
    if torch._C._len_torch_dispatch_stack():
        return DispatchKeySet(DispatchKey.Python)
    keys = DispatchKeySet(DispatchKey.Undefined)
    for tensor in tensors_in((args, kwargs)):
        keys = keys | torch._C._dispatch_keys(tensor)
    keys = keys & torch._C._dispatch_keyset_full_after(DispatchKey.Python)
    return keys if keys.raw_repr() else DispatchKeySet(DispatchKey.CPU)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operator's arguments or results; much faster than a general tree walk."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item
            elif isinstance(item, list | tuple | dict):
                yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def storages_in(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of an operator's arguments, bare ones (`set_` takes one) included."""
    for tensor in tensors_in(value):
        if tensor.layout is torch.strided:
            yield tensor.untyped_storage()
    for argument in value:
        if isinstance(argument, torch.UntypedStorage):
            yield argument


def storage_keys(args: tuple, kwargs: dict) -> set[int]:
    """Identities of the storages that an operator was given."""
    return {storage._cdata for storage in storages_in((*args, *kwargs.values()))}


def resizable(traits: OpTraits, args: tuple, kwargs: dict) -> list[torch.UntypedStorage]:
    """The storages that an operator which may resize could give another size."""
    if traits.out_names:
        return list(storages_in([kwargs[name] for name in traits.out_names if name in kwargs]))
    return list(storages_in(args[:1]))


@contextmanager
def around_sharding_propagation(
    pause: Callable[[], AbstractContextManager[None]],
) -> Iterator[None]:
    """Have `pause()` entered whenever DTensor works out the shape of a result.

    It does so once per operator and shapes, by running the operator on fake tensors of the *global*
    shapes. Nothing of that is memory, and where the program itself computes with fake tensors it
    looks like the real thing.
    """
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    @functools.wraps(propagate)
    def propagate_paused(*args: Any, **kwargs: Any) -> Any:
        with pause():
            return propagate(*args, **kwargs)

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate_paused  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
