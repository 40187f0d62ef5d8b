"""Fifty training steps with full checkpointing and FSDP2 prefetch while one rank is late at random.

A ring whose ranks issued messages in different orders, mixed them with collectives, or repeated
them in a recompute on some ranks only, would hang here within the time limit.
"""

import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.moe.test_fsdp import ShardedBlock
from tests.support.distributed import run_ranks
from titan_relay.moe import RelayOptions
from titan_relay.recompute import relay_checkpoint

STEPS = 50
LATEST_S = 0.2


class Stack(torch.nn.Module):
    """Checkpointed blocks; rank 0 is late now and then before a block."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)
        self.late = random.Random(0)

    def forward(self, x_TD):
        for block in self.blocks:
            if dist.get_rank() == 0 and self.late.random() < 0.2:
                time.sleep(self.late.uniform(0.0, LATEST_S))
            x_TD = relay_checkpoint(block, x_TD, early_stop=False)
        return x_TD


def _train(circulate):
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ep",))
    blocks = [ShardedBlock(seed, mesh, num_experts=2 * world_size) for seed in range(3)]
    for block in blocks:
        block.experts.options = RelayOptions(circulate, num_slices=2)
        fully_shard(block, mesh=mesh, ignored_params=set(ep_parameters([block])))
    stack = fully_shard(Stack(blocks), mesh=mesh, ignored_params=set(ep_parameters(blocks)))
    for module in (stack, *blocks):
        module.set_force_sum_reduction_for_comms(True)
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    optimizer = torch.optim.SGD(stack.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(STEPS):
        tokens = torch.Generator().manual_seed(world_size * step + dist.get_rank())
        loss = stack(torch.randn(6, 8, generator=tokens)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-10:]) < sum(losses[:10])
    return losses


def ep_parameters(blocks):
    return [parameter for block in blocks for parameter in block.experts.parameters()]


@pytest.mark.parametrize(("world_size", "circulate"), [(3, "experts"), (4, "tokens")])
def test_a_late_rank_never_hangs_the_ring(world_size, circulate):
    run_ranks(_train, world_size, circulate, timeout_s=120)
