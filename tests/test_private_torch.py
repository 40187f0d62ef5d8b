"""Every private name of torch that the product uses exists and behaves as the product needs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor

from titan_relay import private_torch as private

ADD = torch.ops.aten.add.Tensor
ONES = torch.ones(3)


class Seen(private.TorchDispatchMode):
    """Remembers the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def noted(times: list[int]) -> Iterator[None]:
    times.append(1)
    yield


@contextmanager
def one_rank() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        private.end_process_groups()


@contextmanager
def rank_3_of_8() -> Iterator[None]:
    private.init_fake_ranks(8, 3)
    try:
        yield
    finally:
        dist.destroy_process_group()


def op_overload() -> None:
    assert isinstance(ADD, private.OpOverload)


def torch_dispatch_mode() -> None:
    with Seen() as seen:
        ONES + ONES
    assert seen.ops == [ADD]


def a_tree() -> None:
    assert private.tree_leaves({"a": [1, (2,)], "b": 3}) == [1, 2, 3]


def unset_fake() -> None:
    with private.ReadableFakeTensors(), private.unset_fake_temporarily():
        assert torch.ones(2).sum().item() == 2


def storage_identity() -> None:
    with private.ReadableFakeTensors():
        x, other = torch.ones(4), torch.ones(4)
        ids = [private.storage_id(each.untyped_storage()) for each in (x, x[1:], other)]
    assert ids[0] == ids[1] != ids[2]


def pushed_modes() -> None:
    seen = Seen()
    private.push_mode(seen)
    ONES + ONES
    private.pop_mode()
    ONES * ONES
    assert seen.ops == [ADD]


def redispatch_keys() -> None:
    class Redispatching(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            return func.redispatch(private.keys_below(args), *args)

    with Redispatching():
        result = ONES + ONES
    with Seen() as seen, Redispatching():
        ONES + ONES
    assert result.tolist() == [2.0] * 3
    assert seen.ops == [ADD]


def schemas() -> None:
    schema = private.schema_of(torch.ops.aten.add.out)
    assert schema.name == "aten::add"
    assert [each.name for each in schema.arguments if each.is_out] == ["out"]
    assert all(each.alias_info is not None for each in schema.returns)


def custom_op_overload() -> None:
    @torch.library.custom_op("titan_relay_tests::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with Seen() as seen:
        same(ONES)
    assert seen.ops[0] is private.overload_of(same)


def storage_resizes() -> None:
    sizes: list[int] = []
    storage = torch.ones(4).untyped_storage()
    with private.on_storage_resize(lambda each: sizes.append(each.nbytes())):
        storage.resize_(0)
    storage.resize_(8)
    assert sizes == [0]


def sharding_propagation() -> None:
    times: list[int] = []
    with rank_3_of_8(), private.around_sharding_propagation(lambda: noted(times)):
        mesh = init_device_mesh("cpu", (8,))
        distribute_tensor(torch.ones(16, 3), mesh, [Shard(0)]).sum(1)
    assert times


def fake_tensors() -> None:
    assert not private.is_fake(ONES)
    with private.ReadableFakeTensors():
        assert private.is_fake(torch.ones(1))


def fake_mode() -> None:
    with private.ReadableFakeTensors():
        assert private.fake_mode_is_on()
    assert not private.fake_mode_is_on()


def readable_fakes() -> None:
    with private.ReadableFakeTensors():
        assert torch.ones(3).sum().item() == 0.0
        assert (torch.arange(2) + ONES.long()[:2])[1].tolist() == 0


def functions_outside_fake() -> None:
    with private.ReadableFakeTensors():
        assert private.outside_fake(lambda: torch.ones(2).sum().item())() == 2


def device_meshes() -> None:
    ranks = torch.arange(8).view(2, 4)
    with rank_3_of_8(), private.ReadableFakeTensors(), private.real_device_meshes():
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))
        assert mesh["b"].get_local_rank() == 3


def fake_ranks() -> None:
    with rank_3_of_8():
        dist.all_reduce(ONES.clone())
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)


def backward_runs() -> None:
    said: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: said.append(private.in_backward()))
    x.sum().backward()
    assert said == [True]
    assert not private.in_backward()


def node_order() -> None:
    first = torch.ones(1, requires_grad=True) * 2
    second = first * 2
    assert private.sequence_number(second.grad_fn) > private.sequence_number(first.grad_fn)


def saved_tensors() -> None:
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *, saved: bool = True) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

    x = torch.ones(1, requires_grad=True)
    results = (x * x, x.sigmoid(), Saves.apply(x), x + x, x.view(1, 1), x.sum())
    assert [private.saves_tensors(each.grad_fn) for each in results] == [True] * 3 + [False] * 3


def module_calls() -> None:
    module = nn.Linear(3, 1)
    with private.called_as(module, lambda usual: lambda x: usual(x) * 0):
        assert module(ONES).item() == 0
    assert module(ONES).equal(module.forward(ONES))


def wrapped_checkpoint() -> None:
    times: list[int] = []
    module = nn.Linear(3, 1)
    module.register_forward_hook(lambda *_: times.append(1))
    wrapper = private.checkpoint_wrapper(module, early_stop=False)
    wrapper(ONES.clone().requires_grad_()).backward()
    assert [name for name, _ in wrapper.named_parameters()] == ["weight", "bias"]
    assert len(times) == 2


def named_groups() -> None:
    with one_rank() as group:
        assert private.group_named(group.group_name) is group


def ended_groups() -> None:
    with one_rank():
        private.end_process_groups()
        assert not dist.is_initialized()
        private.end_process_groups()


def timeouts() -> None:
    with one_rank() as group:
        private.set_group_timeout(timedelta(seconds=77), group)
        assert private.group_timeout(group) == timedelta(seconds=77)


def groups_by_name() -> None:
    with one_rank():
        wait = timedelta(seconds=9)
        group = private.new_group_named("ours", [0], backend="gloo", timeout=wait, purpose="test")
        assert private.group_named("ours") is group
        assert dist.get_process_group_ranks(group) == [0]
        dist.all_reduce(ONES.clone(), group=group)


def local_blocks() -> None:
    with rank_3_of_8():
        mesh = init_device_mesh("cpu", (8,))
        tensor = distribute_tensor(torch.ones(10, 3), mesh, [Shard(0)])
        assert private.local_block(tensor) == ((2, 3), (6, 0))


def fsdp_steps() -> None:
    times: list[int] = []
    with one_rank():
        module = nn.Linear(3, 1)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        with private.around_fsdp_steps(lambda: noted(times)):
            module(ONES).backward()
        during = len(times)
        module(ONES).backward()
    assert during == len(times) > 3


def pipelines() -> None:
    """All three names: stages, what follows their inference of shapes, cut microbatches."""
    cleaned: list[int] = []
    with one_rank():
        stage = PipelineStage(nn.Linear(3, 1), 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).sum())
        assert list(private.stages_of(schedule)) == [stage]
        private.after_metadata_inference(stage, lambda: cleaned.append(1))
        losses: list[torch.Tensor] = []
        cut = ([(ONES,), (ONES,)], [{}, {}], [ONES[:1], ONES[:1]], losses, False)
        private.run_microbatches(schedule, cut, has_backward=True, loss_kwargs=None)
    assert len(losses) == 2
    assert cleaned == [1]


CHECKS: dict[str, Callable[[], None]] = {
    "OpOverload": op_overload,
    "TorchDispatchMode": torch_dispatch_mode,
    "tree_leaves": a_tree,
    "unset_fake_temporarily": unset_fake,
    "storage_id": storage_identity,
    "push_mode": pushed_modes,
    "pop_mode": pushed_modes,
    "keys_below": redispatch_keys,
    "schema_of": schemas,
    "overload_of": custom_op_overload,
    "on_storage_resize": storage_resizes,
    "around_sharding_propagation": sharding_propagation,
    "is_fake": fake_tensors,
    "fake_mode_is_on": fake_mode,
    "ReadableFakeTensors": readable_fakes,
    "outside_fake": functions_outside_fake,
    "real_device_meshes": device_meshes,
    "init_fake_ranks": fake_ranks,
    "in_backward": backward_runs,
    "sequence_number": node_order,
    "saves_tensors": saved_tensors,
    "called_as": module_calls,
    "checkpoint_wrapper": wrapped_checkpoint,
    "end_process_groups": ended_groups,
    "group_named": named_groups,
    "group_timeout": timeouts,
    "set_group_timeout": timeouts,
    "new_group_named": groups_by_name,
    "local_block": local_blocks,
    "around_fsdp_steps": fsdp_steps,
    "stages_of": pipelines,
    "after_metadata_inference": pipelines,
    "run_microbatches": pipelines,
}


@pytest.mark.parametrize("name", CHECKS)
def test_torch_still_does(name: str) -> None:
    CHECKS[name]()


def test_every_name_is_tried() -> None:
    own = {
        name
        for name, value in vars(private).items()
        if not name.startswith("_") and inspect.getmodule(value) is private
    }
    assert own | set(private.__all__) == set(CHECKS)
