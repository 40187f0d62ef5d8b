"""Every private name of torchtitan that the product uses exists and behaves as it is needed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_relay import private_torch
from titan_relay.titan import private_torchtitan as private  # adapts torchtitan, before it is used
from titan_relay.titan.device import on_cpu

DIMS = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 2, "ep": 1, "world_size": 4}


def adapted() -> None:
    """`titan_relay.titan` has called it already."""
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.tools import utils as tools

    if on_cpu():
        assert tools.device_type == "cpu"
        assert tools.get_local_device() == torch.device("cpu")
        assert tools.get_peak_flops("any") != tools.get_peak_flops("any")  # not a number
    private_torch.init_fake_ranks(4, 1)
    try:
        dims = ParallelDims(**DIMS)
        dims.build_mesh()
        utils.set_pg_timeouts(torch.distributed.default_pg_timeout, dims)
    finally:
        dist.destroy_process_group()


def set_up() -> None:
    from torchtitan.config import DebugConfig
    from torchtitan.distributed import ParallelDims, utils

    methods = (ParallelDims.build_mesh, utils.set_determinism, DeviceMesh.__init__)
    private_torch.init_fake_ranks(4, 3)
    try:
        with private_torch.ReadableFakeTensors(), private.set_up_outside_fake():
            dims = ParallelDims(**DIMS)
            dims.build_mesh()
            assert dims.get_mesh("pp").get_local_rank() == 1
            debug = DebugConfig(seed=7)
            utils.set_determinism(dims, torch.device("cpu"), debug, distinct_seed_mesh_dims=["pp"])
    finally:
        dist.destroy_process_group()
    assert methods == (ParallelDims.build_mesh, utils.set_determinism, DeviceMesh.__init__)


def rank_with_loss() -> None:
    from torchtitan.distributed import ParallelDims

    assert private.metrics_rank(ParallelDims(**DIMS), "1F1B") == 2
    assert private.metrics_rank(ParallelDims(**DIMS | {"pp": 1, "dp_shard": 4}), "1F1B") == 0


def loggers() -> None:
    from torchtitan.components.metrics import BaseLogger, LoggerContainer

    container, logger = LoggerContainer(), BaseLogger()
    container.add_logger(logger)
    assert list(private.loggers_of(container)) == [logger]
    assert not private.loggers_of(logger)


def chunked_head() -> None:
    """The trainer sets the attribute by its name, so it must be one that the class has."""
    from torchtitan.models.common.decoder import Decoder

    assert private.head_is_left_out(Decoder) is False
    assert private.head_is_left_out(SimpleNamespace(_skip_lm_head=True))


def even_routes() -> None:
    router = router_of(num_experts=8, top_k=2)
    ids_BLK, scores_BLK = private.even_routing(router, torch.rand(1, 4, 8))
    assert ids_BLK.flatten().bincount(minlength=8).tolist() == [1] * 8
    assert scores_BLK.shape == (1, 4, 2)
    assert not private.routes_evenly(router)
    assert private.routes_evenly(router_of(num_experts=8, _debug_force_load_balance=True))


def grouped_scores() -> None:
    router = router_of(num_experts=8, top_k=2, num_expert_groups=4, num_limited_groups=1)
    scores_E = private.scores_in_groups(router, torch.arange(8.0).view(1, 1, 8)).flatten()
    assert scores_E.topk(2).indices.tolist() == [7, 6]
    assert scores_E[:6].isinf().all()


def replaced_methods() -> None:
    for path, methods in private.REPLACED_METHODS.items():
        module, _, name = path.rpartition(".")
        owner = getattr(importlib.import_module(module), name)
        for method in methods:
            assert callable(getattr(owner, method)), f"{path}.{method}"


def router_of(**keys: Any) -> Any:
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import TokenChoiceTopKRouter

    gate = Linear.Config(in_features=4, out_features=8)
    return TokenChoiceTopKRouter.Config(gate=gate, **keys).build()


CHECKS: dict[str, Callable[[], None]] = {
    "adapt_torchtitan": adapted,
    "set_up_outside_fake": set_up,
    "metrics_rank": rank_with_loss,
    "loggers_of": loggers,
    "head_is_left_out": chunked_head,
    "routes_evenly": even_routes,
    "even_routing": even_routes,
    "scores_in_groups": grouped_scores,
    "REPLACED_METHODS": replaced_methods,
}


@pytest.mark.parametrize("name", CHECKS)
def test_torchtitan_still_does(name: str) -> None:
    CHECKS[name]()


def test_every_name_is_tried() -> None:
    own = {
        name
        for name, value in vars(private).items()
        if not name.startswith("_") and inspect.getmodule(value) is private
    }
    assert own | {"REPLACED_METHODS"} == set(CHECKS)
