"""Every private name of torch that this project uses, and every patch of torch: here and nowhere
else.

Private is a name of which a part begins with one underscore: torch promises nothing about it. Each
stands here behind a public name that says what it is for and why torch's public names do not do;
`tests/test_private_torch.py` tries each. Tested with torch 2.13 and 2.14; in torch 2.11, which the
base can do with, only those of pipelines are missing.

What is large in `torch.distributed` is imported when something of it is used: counting bytes does
not need it, and DTensor's modules alone take half a second.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.nn  # before a process group is made: see end_process_groups
from torch import nn
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    import torch.distributed as dist

# OpOverload: the type of an operator that a dispatch mode is given; no public module has it.
# TorchDispatchMode: the only way to see every operator; documented, but in a private module.
# tree_leaves: the tensors in any nesting of outputs, as torch.utils.checkpoint itself sees them.
# unset_fake_temporarily: a stretch of real tensors within a fake mode.
__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "tree_leaves",
    "unset_fake_temporarily",
]


# Dispatch modes and operators: what counts bytes on the way of every operator. --------------------


def storage_id(storage: torch.UntypedStorage) -> int:
    """Which memory a storage is. `data_ptr()` is 0 for fake and for empty storages."""
    return storage._cdata


def push_mode(mode: TorchDispatchMode) -> None:
    """Turn a dispatch mode on without what entering it does; around every call of an op's body."""
    torch._C._push_on_torch_dispatch_stack(mode)


def pop_mode() -> None:
    """Turn the dispatch mode that was pushed last off again."""
    torch._C._pop_torch_dispatch_stack(None)


def keys_below(tensors: Iterable[torch.Tensor]) -> DispatchKeySet:
    """Where an operator goes on below a dispatch mode: to the next mode, else to its device's
    kernel. `redispatch` takes it; a call would come by the function modes again."""
    if torch._C._len_torch_dispatch_stack():
        return DispatchKeySet(DispatchKey.Python)
    keys = DispatchKeySet(DispatchKey.Undefined)
    for tensor in tensors:
        keys = keys | torch._C._dispatch_keys(tensor)
    keys = keys & torch._C._dispatch_keyset_full_after(DispatchKey.Python)
    return keys if keys.raw_repr() else DispatchKeySet(DispatchKey.CPU)


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Names of an operator's arguments, and which of its results alias them."""
    return op._schema


def overload_of(op: Any) -> OpOverload:
    """The operator that `torch.library.custom_op` has registered, as checkpoint policies see it."""
    overload: OpOverload = op._opoverload
    return overload


@contextmanager
def on_storage_resize(callback: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `callback(storage)` after every `UntypedStorage.resize_` in this process.

    That is how FSDP2 frees and refills its unsharded parameters. `resize_` is a plain method, no
    operator, so it has to be replaced while someone listens.
    Uses nest; each one restores what it found.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        result = resize(storage, num_bytes)
        callback(storage)
        return result

    with _replaced(torch.UntypedStorage, "resize_", resize_and_tell):
        yield


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

    name = "_propagate_tensor_meta_non_cached"
    with _replaced(ShardingPropagator, name, _within(pause, getattr(ShardingPropagator, name))):
        yield


# Fake tensors. ------------------------------------------------------------------------------------


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no memory."""
    return isinstance(tensor, FakeTensor)


def fake_mode_is_on() -> bool:
    """Whether this thread computes with fake tensors at the moment."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


_NO_KEYWORDS: MappingProxyType[str, Any] = MappingProxyType({})


class ReadableFakeTensors(FakeTensorMode):
    """Fake tensors from which a number can be read back: it is 0. Real tensors may come in."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Any = _NO_KEYWORDS
    ) -> Any:
        """Run an operator on shapes alone."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        return super().__torch_dispatch__(func, types, args, kwargs)


def outside_fake(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run on real tensors within a fake mode too."""
    return _within(unset_fake_temporarily, function)


@contextmanager
def real_device_meshes() -> Iterator[None]:
    """Let device meshes made inside a fake mode compute their ranks with real numbers."""
    from torch.distributed.device_mesh import DeviceMesh

    with _replaced(DeviceMesh, "__init__", outside_fake(DeviceMesh.__init__)):
        yield


def init_fake_ranks(world_size: int, rank: int) -> None:
    """Be one rank of many in a process group whose collectives do nothing.

    The "fake" backend is public; the store without which it does not start is torch's testing one.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


# Autograd and modules. ----------------------------------------------------------------------------

# Nodes written in C++ whose saved tensors Python cannot see.
_OPAQUE_NODES = ("CppFunction", "CopySlices")


def in_backward() -> bool:
    """Whether autograd is running on this thread."""
    return torch._C._current_graph_task_id() >= 0


def sequence_number(node: Node) -> int:
    """A number that is higher for nodes of the graph that were made later on this thread."""
    return node._sequence_nr()


def saves_tensors(node: Node) -> bool:
    """Whether a node of the graph keeps tensors for its backward; True where that cannot be seen.

    They are only counted, never unpacked: unpacking one would start a recompute.
    """
    if type(node).__name__ in _OPAQUE_NODES or "CompiledFunction" in type(node).__name__:
        return True
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return len(node._raw_saved_tensors) > 0
    return any(name.startswith("_raw_saved_") for name in dir(node))


@contextmanager
def called_as(module: nn.Module, wrap: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Have `module(...)` call `wrap(the usual call)`, which may leave the module's hooks out.

    A subclass would have another type, which FSDP and checkpoints look at; this is what
    `nn.Module.compile` sets to be called in another way.
    """
    usual: Any = module._call_impl
    with _replaced(module, "_compiled_call_impl", wrap(usual)):
        yield


def checkpoint_wrapper(module: nn.Module, **kwargs: Any) -> nn.Module:
    """A module that recomputes its forward in backward and keeps the names of its parameters.

    torchtitan and FSDP know this wrapper; there is no public one.
    """
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    return wrapper.checkpoint_wrapper(module, **kwargs)


# Process groups. ----------------------------------------------------------------------------------


def end_process_groups() -> None:
    """End this rank's process groups, if any, and their threads. Local; call it as the last.

    gloo joins a group's threads when the last reference to the group goes. A thread that lets go of
    its last tensor after the interpreter has begun to end asks for the GIL, is ended for it, and
    C++ aborts the process ("terminate called without an active exception"). So nothing may hold a
    group for longer. `destroy_process_group` lets go of torch's own references, but the
    default arguments in `torch.distributed.nn`, which the first optimizer imports, hold for ever
    the default group that there is at the import: this module imports it while there is none.
    What is left are circles, which models and meshes are part of, and DTensor's caches of meshes:
    they cannot all be cleared, but by now the threads have long been done with their last tensors.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a registered op was given by name; ops cannot be given the object."""
    from torch.distributed import distributed_c10d as c10d

    return c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long operations of a group wait; torch's default where its backend does not say."""
    from torch.distributed import distributed_c10d as c10d

    backend = group._get_backend(group._device_types[0])
    options = getattr(backend, "options", None)
    return c10d.default_pg_timeout if options is None else options._timeout


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Let operations of a group wait this long from now on; public from torch 2.14 only."""
    import torch.distributed as dist

    public = getattr(dist, "set_timeout", None)
    (public or dist.distributed_c10d._set_pg_timeout)(timeout, group)


def new_group_named(
    name: str, ranks: Sequence[int], *, backend: str, timeout: timedelta, purpose: str
) -> dist.ProcessGroup:
    """A process group of that name, in that order. A collective over `ranks`, and only them.

    `torch.distributed.new_group` chooses the name itself, by how many groups the rank knows.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    default = c10d._get_default_group()
    bound_device = default.bound_device_id
    # With a bound device, NCCL would split the default group's communicator, which every rank of
    # the world would have to join. Unbound, it makes one of its own.
    default.bound_device_id = None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            c10d.Backend(backend),
            c10d._get_default_store(),
            name,  # type: ignore[arg-type]
            timeout=timeout,
            group_desc=purpose,
        )
    finally:
        default.bound_device_id = bound_device
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


# DTensor, FSDP and pipelines: the trainer's. ------------------------------------------------------


def local_block(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's part of a DTensor, and where it begins in the whole; no public name
    knows how parts of uneven sizes lie."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(shape), tuple(offset)


_FSDP_STEPS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward", "reshard")


@contextmanager
def around_fsdp_steps(label: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Have `label()` entered around everything that FSDP2 does by itself between modules."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    with ExitStack() as stack:
        for name in _FSDP_STEPS:
            step = _within(label, getattr(FSDPParamGroup, name))
            stack.enter_context(_replaced(FSDPParamGroup, name, step))
        yield


def stages_of(schedule: Any) -> Sequence[Any]:
    """This rank's stages of a pipeline schedule, of which some have one and some several."""
    one = getattr(schedule, "_stage", None)
    return schedule._stages if one is None else [one]


def after_metadata_inference(stage: Any, clean_up: Callable[[], None]) -> None:
    """Have `clean_up()` called once a stage has found out its shapes.

    Before its first step a stage runs forward and backward on uninitialised memory.
    """
    usual = stage._post_metadata_inference_cleanup

    def clean_up_too() -> None:
        usual()
        clean_up()

    stage._post_metadata_inference_cleanup = clean_up_too


def run_microbatches(
    schedule: Any,
    microbatches: tuple[Any, ...],
    *,
    has_backward: bool,
    loss_kwargs: dict[str, Any] | None,
) -> None:
    """Run a schedule of torch 2.13 on microbatches that are cut already; public from 2.14 on."""
    schedule._has_backward = has_backward
    for stage in stages_of(schedule):
        stage.has_backward = has_backward
        stage.clear_runtime_states()
    schedule._step_microbatches(*microbatches, loss_kwargs=loss_kwargs)


# Patching. ----------------------------------------------------------------------------------------


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of torch's with another value inside."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _within(
    context: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function, which enters `context()` whenever it runs."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return run
