"""Block inputs in host memory: buffers within a budget, fetched ahead of need."""

import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titan_relay.recompute import relay_checkpoint
from titan_relay.recompute.frame import Keeps
from titan_relay.recompute.host_inputs import HostBuffers, HostInputs


class Sine(torch.autograd.Function):
    """Notes when its backward has its input."""

    @staticmethod
    def forward(ctx, h, layer, events):
        ctx.save_for_backward(h)
        ctx.layer, ctx.events = layer, events
        return h.sin()

    @staticmethod
    def backward(ctx, grad):
        (h,) = ctx.saved_tensors
        ctx.events.append(("backward", ctx.layer))
        return grad * h.cos(), None, None


class Copies(TorchDispatchMode):
    """Notes which layer's input is copied, by what it holds."""

    def __init__(self, inputs, events) -> None:
        super().__init__()
        self.inputs, self.events = inputs, events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            layer = next(i for i, h in enumerate(self.inputs) if torch.equal(h, args[1]))
            self.events.append(("fetch", layer))
        return func(*args, **(kwargs or {}))


def three_blocks(host, events):
    """Their output and their inputs, on the host where there is one."""
    h = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True) * 1
    inputs = []
    for layer in range(3):
        inputs.append(h.detach().clone())
        keeps = functools.partial(Keeps, host=host, layer=layer)
        h = relay_checkpoint(Sine.apply, h, layer, events, keeps=keeps)
    return h, inputs


def test_a_block_input_is_fetched_ahead_of_the_block_after_it() -> None:
    events = []
    out, inputs = three_blocks(HostInputs(2**20), events)
    with Copies(inputs, events):
        out.sum().backward()
    assert events == [
        *(("fetch", 2), ("fetch", 1), ("backward", 2)),
        *(("fetch", 0), ("backward", 1)),
        ("backward", 0),
    ]


def test_nothing_goes_to_the_host_without_a_backward() -> None:
    host = HostInputs(2**20)
    with torch.no_grad():
        three_blocks(host, [])
    assert host.buffers.allocated_bytes == 0
    three_blocks(host, [])
    assert host.buffers.allocated_bytes > 0


def test_host_buffers_are_reused_within_their_budget() -> None:
    buffers = HostBuffers(100, pinned=False)
    first = buffers.take(60)
    assert buffers.take(60) is None
    buffers.give_back(first)
    assert buffers.take(60) is first
    assert buffers.take(40) is not None
    assert buffers.allocated_bytes == 100


def test_host_buffers_shrink_by_what_is_unused() -> None:
    buffers = HostBuffers(100, pinned=False)
    held = [buffers.take(30) for _ in range(3)]
    assert buffers.shrink(1000) == 0  # all are in use
    for buffer in held[:2]:
        buffers.give_back(buffer)
    assert buffers.shrink(59) == 30  # whole buffers, and no more than asked for
    assert buffers.allocated_bytes == buffers.budget_bytes == 60
    assert buffers.take(30) is held[0]
    assert buffers.take(30) is None
