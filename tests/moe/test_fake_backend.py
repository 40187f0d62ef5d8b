"""A dry run: a group of the fake backend, fake tensors, no other process."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.distributed import run_ranks
from titan_relay.moe import ExpertWeights, RingError, relay_moe, relay_ring


def _dry_run():
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    group = dist.distributed_c10d._get_default_group()
    relay_ring(group)

    def run():
        x_TD = torch.randn(6, 16, requires_grad=True)
        ids_TK = torch.zeros(6, 2, dtype=torch.int64)
        weights = torch.randn(2, 4, 16), torch.randn(2, 16, 4), torch.randn(2, 4, 16)
        out_TD = relay_moe(x_TD, torch.rand(6, 2), ids_TK, ExpertWeights(*weights), group)
        out_TD.sum().backward()
        return x_TD.grad.shape

    with FakeTensorMode():
        assert run() == (6, 16)
    with pytest.raises(RingError, match="fake backend"):
        run()


def test_fake_ranks_serve_fake_tensors_and_nothing_else():
    run_ranks(_dry_run, 1)
