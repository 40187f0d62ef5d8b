"""The relay under activation checkpointing and torch.compile: same bits, no ring run twice."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.support.blocks import DIM, Block, gradients_of, messages_sent
from tests.support.distributed import run_ranks, subgroup
from titan_relay.moe import relay_ops
from titan_relay.recompute import relay_checkpoint


def plain(block, x_TD):
    return block(x_TD)


def save_relay_ops():
    def policy(ctx, func, *args, **kwargs):
        if func in relay_ops() or func == torch.ops.aten.mm.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def save_products_only():
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


CHECKPOINTS = {
    "plain torch": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
    "relay": relay_checkpoint,
    "relay, no early stop": functools.partial(relay_checkpoint, early_stop=False),
    "relay, selective": functools.partial(relay_checkpoint, context_fn=save_products_only),
    "selective, relay saved": functools.partial(
        checkpoint, use_reentrant=False, context_fn=save_relay_ops
    ),
}
# How often a block's ring forward runs in forward and backward together.
RING_FORWARDS = {"plain torch": 2}


def _assert_same(actual, expected):
    assert torch.equal(actual[0], expected[0])
    for mine, wanted in zip(actual[1], expected[1], strict=True):
        assert torch.equal(mine, wanted)


def _check_checkpoints(post_norm, circulate):
    for num_ranks in (2, 4):
        group = subgroup(range(num_ranks))
        if group is None:
            continue
        blocks = [Block(group, seed, post_norm, circulate) for seed in range(3)]
        x_TD = torch.randn(10, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
        expected = gradients_of(blocks, x_TD, plain)
        once = messages_sent(group)
        with torch.no_grad():
            for block in blocks:
                block(x_TD)
        forward_only = messages_sent(group)
        for name, run in CHECKPOINTS.items():
            _assert_same(gradients_of(blocks, x_TD, run), expected)
            repeats = RING_FORWARDS.get(name, 1) - 1
            if post_norm and "saved" not in name:
                repeats = 1  # the norm needs the value, so the recompute does the real thing
            assert messages_sent(group) == once + repeats * forward_only, name
    dist.barrier()


@pytest.mark.parametrize("circulate", ["experts", "tokens"])
def test_pre_norm_blocks_get_equal_bits_and_no_second_ring(circulate):
    run_ranks(_check_checkpoints, 4, False, circulate)


def test_post_norm_blocks_get_the_real_value():
    run_ranks(_check_checkpoints, 4, True, "experts")


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_one_rank(name, post_norm):
    blocks = [Block(None, seed, post_norm) for seed in range(2)]
    x_TD = torch.randn(10, DIM)
    expected = gradients_of(blocks, x_TD, plain)
    _assert_same(gradients_of(blocks, x_TD, CHECKPOINTS[name]), expected)


class _SavesNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class _SavesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize(
    "after",
    [
        lambda out: out.view(2, 5, DIM).transpose(0, 1).reshape(10, DIM),
        lambda out: out.double().float() - out,
        _SavesNothing.apply,
        _SavesItsInput.apply,
        lambda out: out * out,
        lambda out: out.relu(),
        lambda out: torch.cat([out, out.sin()]).sum(0),
        lambda out: torch.nn.functional.dropout(out, 0.0),
    ],
)
def test_what_follows_the_relay_decides_whether_its_value_is_needed(after):
    block = Block(None, 0)

    def run(module, x_TD):
        return after(module(x_TD))

    x_TD = torch.randn(10, DIM)
    expected = gradients_of([block], x_TD, run)
    actual = gradients_of([block], x_TD, lambda module, x: relay_checkpoint(run, module, x))
    _assert_same(actual, expected)


def test_block_with_two_outputs_and_keyword_arguments():
    block = Block(None, 0)

    def run(x_TD, *, scale):
        out_TD = block(x_TD)
        return out_TD, out_TD * scale

    x_TD = torch.randn(10, DIM)
    results = []
    for wrapper in (lambda f, *a, **k: f(*a, **k), relay_checkpoint):
        block.zero_grad()
        first, second = wrapper(run, x_TD, scale=torch.tensor(3.0))
        (first.sum() + second.square().sum()).backward()
        results.append([parameter.grad.clone() for parameter in block.parameters()])
    for mine, wanted in zip(*results, strict=True):
        assert torch.equal(mine, wanted)


def _check_compile():
    group = subgroup([0, 1])
    if group is None:
        return
    blocks = [Block(group, seed) for seed in range(2)]
    x_TD = torch.randn(10, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
    expected = gradients_of(blocks, x_TD, plain)
    once = messages_sent(group)
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    runs = {
        "compiled block": lambda block, x: block(x),
        "checkpoint inside the compiled region": torch.compile(
            lambda block, x: relay_checkpoint(block.forward, x), backend="aot_eager"
        ),
    }
    for name, run in runs.items():
        actual = gradients_of(blocks, x_TD, run)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        assert messages_sent(group) == once, name


def test_compiled_blocks_run_each_ring_once():
    run_ranks(_check_compile, 2)
