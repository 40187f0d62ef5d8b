"""The relay on weights that FSDP2 shards: freed after forward, gathered again in backward.

And fifty training steps with full checkpointing and prefetch while one rank is late at random: a
ring whose ranks issued messages in different orders, mixed them with collectives, or repeated them
in a recompute on some ranks only, would hang there within the time limit.
"""

import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from layer_check.dense_truth import relative_error
from tests.support.blocks import DIM, NUM_EXPERTS, Block, messages_sent
from tests.support.distributed import run_ranks
from titan_relay.moe import ExpertWeights, RelayOptions, relay_moe
from titan_relay.recompute import relay_checkpoint

EP, DP = 2, 2
NUM_LAYERS = 2
STEPS = 50
LATEST_S = 0.2
EXPERTS = ("w1", "w2", "w3")


class Experts(torch.nn.Module):
    """The relay as a module whose parameters are sharded over experts, as trainers have it."""

    def __init__(self, block, ep_mesh):
        super().__init__()
        self.group, self.options = ep_mesh.get_group(), block.options
        for name in EXPERTS:
            whole = getattr(block, name).detach()
            sharded = distribute_tensor(whole, ep_mesh, [Shard(0)])
            self.register_parameter(name, torch.nn.Parameter(sharded))

    def forward(self, x_TD, scores_TK, ids_TK):
        local = [getattr(self, name) for name in EXPERTS]
        local = [w.to_local() if isinstance(w, DTensor) else w for w in local]
        return relay_moe(x_TD, scores_TK, ids_TK, ExpertWeights(*local), self.group, self.options)


class ShardedBlock(torch.nn.Module):
    def __init__(self, seed, ep_mesh, num_experts=NUM_EXPERTS):
        super().__init__()
        whole = Block(None, seed, num_experts=num_experts)
        self.gate, self.inner = whole.gate, whole.inner
        self.experts = Experts(whole, ep_mesh)

    def forward(self, x_TD):
        hidden_TD = x_TD + torch.tanh(x_TD @ self.inner)
        normed_TD = torch.nn.functional.rms_norm(hidden_TD, (DIM,))
        scores_TE = torch.softmax(normed_TD @ self.gate.t(), dim=-1)
        scores_TK, ids_TK = scores_TE.topk(2, dim=-1)
        return hidden_TD + self.experts(normed_TD, scores_TK, ids_TK)


def _reference(tokens):
    """Every rank's tokens through unsharded layers in one process; loss summed over ranks."""
    blocks = [Block(None, seed).double() for seed in range(NUM_LAYERS)]
    for block in blocks:
        block.shared = None
    x_TD = tokens.double()
    for block in blocks:
        hidden_TD = x_TD + torch.tanh(x_TD @ block.inner)
        normed_TD = torch.nn.functional.rms_norm(hidden_TD, (DIM,))
        scores_TE = torch.softmax(normed_TD @ block.gate.t(), dim=-1)
        scores_TK, ids_TK = scores_TE.topk(2, dim=-1)
        experts = ExpertWeights(block.w1, block.w2, block.w3)
        x_TD = hidden_TD + relay_moe(normed_TD, scores_TK, ids_TK, experts)
    x_TD.square().sum().backward()
    return blocks


def _full_gradient(parameter):
    grad = parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _check(checkpointed):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (DP, EP), mesh_dim_names=("dp", "ep"))
    blocks = [ShardedBlock(seed, mesh["ep"]) for seed in range(NUM_LAYERS)]
    for block in blocks:
        fully_shard(block.experts, mesh=mesh["dp"])
        fully_shard(block, mesh=init_device_mesh("cpu", (DP * EP,), mesh_dim_names=("fsdp",)))
        for module in block.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    tokens = torch.randn(4, 6, DIM, generator=torch.Generator().manual_seed(7))
    x_TD = tokens[dist.get_rank()]
    for block in blocks:
        x_TD = relay_checkpoint(block, x_TD) if checkpointed else block(x_TD)
    forward_messages = messages_sent(blocks[0].experts.group)
    x_TD.square().sum().backward()
    # Weights and gradients in each layer's backward, and no forward repeated.
    assert messages_sent(blocks[0].experts.group) == 2 * forward_messages
    for block, whole in zip(blocks, _reference(tokens.flatten(0, 1)), strict=True):
        for name in EXPERTS:
            actual = _full_gradient(getattr(block.experts, name))
            error = relative_error(actual, getattr(whole, name).grad)
            # Float32 through two layers; an expert gradient off by the EP degree would be 1.0.
            assert error < 1e-5, (name, error)
        assert relative_error(_full_gradient(block.gate), whole.gate.grad) < 1e-5


def _check_both():
    for checkpointed in (False, True):
        _check(checkpointed)


def test_expert_gradients_under_fsdp_equal_one_process():
    run_ranks(_check_both, DP * EP)


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
