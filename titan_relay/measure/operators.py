"""What the live-bytes tracker has to know of operators and of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from titan_relay.private_torch import (
    OpOverload,
    TorchDispatchMode,
    pop_mode,
    push_mode,
    schema_of,
    storage_id,
)

# Their kernels are C++, so there is nothing of ours to see inside.
_BUILTIN_NAMESPACES = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler"})
# Operators that may give a storage another size, besides every out= variant.
_RESIZING_OPS = frozenset(
    {"aten::resize_", "aten::resize_as_", "aten::set_", "inductor::resize_storage_bytes_"}
)
# Calls that only read a tensor, `__get__` being every attribute (views of a kind, such as `.T`,
# included): not worth turning the tracker on for.
_READING_CALLS = frozenset(
    {"__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "item", "numel"}
    | {"size", "storage_offset", "stride"}
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
    schema = schema_of(func)
    out_names = tuple(argument.name for argument in schema.arguments if argument.is_out)
    returns_fresh = all(result.alias_info is None for result in schema.returns)
    return OpTraits(
        name=str(func),
        runs_python=func.namespace not in _BUILTIN_NAMESPACES,
        may_resize=bool(out_names) or schema.name in _RESIZING_OPS,
        # Only these schemas are known to be right about it.
        may_alias=not (returns_fresh and func.namespace == "aten"),
        out_names=out_names,
    )


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
    return {storage_id(storage) for storage in storages_in((*args, *kwargs.values()))}


def resizable(traits: OpTraits, args: tuple, kwargs: dict) -> list[torch.UntypedStorage]:
    """The storages that an operator which may resize could give another size."""
    if traits.out_names:
        return list(storages_in([kwargs[name] for name in traits.out_names if name in kwargs]))
    return list(storages_in(args[:1]))


class LookInside(TorchFunctionMode):
    """Turns a tracker on again for each torch call made within an operator's Python body."""

    def __init__(self, tracker: TorchDispatchMode) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READING_CALLS:
            return func(*args, **(kwargs or {}))
        # Not `with tracker`: that is slow, and would also install the hooks once more.
        push_mode(self._tracker)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            pop_mode()
