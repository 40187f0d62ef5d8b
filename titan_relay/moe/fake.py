"""The ops on fake tensors: shapes of the results, and for a moment the memory of the real call.

A dry run on fake tensors measures a layer's peak by the tensors that come into being. The real call
works with buffers of its own, so its fake allocates as many bytes, as one tensor, and drops it.

Shape legend: T tokens, K top-k, D model dimension, e experts of this rank, E experts.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from relay_kernels import ExpertWeights
from titan_relay.moe.call import layer_shape
from titan_relay.moe.memory import (
    WorkingMemory,
    backward_memory,
    forward_memory,
    routing_peak_bytes,
)
from titan_relay.moe.options import RelayOptions, options_from_spec
from titan_relay.moe.routing import NUM_FAULT_FIELDS
from titan_relay.moe.shapes import LayerShape
from titan_relay.private_torch import group_named

# The device whose memory the fakes take, where it is not that of the fake tensors.
_device: ContextVar[torch.device | None] = ContextVar("titan_relay_fake_device", default=None)


@contextlib.contextmanager
def fake_device(device: torch.device) -> Iterator[None]:
    """Work with as much memory as on `device`, whatever device the fake tensors say.

    For a dry run on fake CPU tensors that stands for a run on CUDA.
    """
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def fake_route(
    expert_ids_TK: torch.Tensor,
    num_experts: int,
    num_slices: int,
    slice_length: int,
    kernels: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows_N`` and counts."""
    num_rows = expert_ids_TK.numel()
    rows_N = expert_ids_TK.new_empty(num_rows, dtype=torch.int32)
    if isinstance(num_rows, int):
        _touch(rows_N, routing_peak_bytes(num_rows) - rows_N.nbytes)
    num_counts = num_slices * num_experts + NUM_FAULT_FIELDS
    return rows_N, torch.empty(num_counts, dtype=torch.int64, device="cpu")


def fake_forward(
    x_TD: torch.Tensor, scores_TK: torch.Tensor, tensors: Sequence[Any], group: str, spec: str
) -> torch.Tensor:
    """``out_TD``; ``tensors`` are the weights and biases."""
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    _touch_buffers(forward_memory, x_TD, scores_TK, tensors, group, spec)
    return out_TD


def fake_backward(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    tensors: Sequence[Any],
    group: str,
    spec: str,
    wants: Sequence[bool],
) -> list[torch.Tensor]:
    """The gradients wanted, and empty tensors; ``wants`` is of x, scores and the weights."""
    wants_x, wants_scores, wants_weights = wants
    wanted = [(x_TD, wants_x), (scores_TK, wants_scores)]
    wanted += [(tensor, wants_weights) for tensor in tensors]
    results = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if wants and tensor is not None
        else x_TD.new_empty(0)
        for tensor, wants in wanted
    ]
    memory = functools.partial(backward_memory, weights_want_gradients=wants_weights)
    _touch_buffers(memory, x_TD, scores_TK, tensors, group, spec)
    return results


def _touch_buffers(
    memory_of: Callable[[LayerShape, RelayOptions, torch.device], WorkingMemory],
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    tensors: Sequence[Any],
    group: str,
    spec: str,
) -> None:
    """What the call works with, but its results and the rows that ``fake_route`` has made already;
    nothing where a compiler traces with symbolic sizes."""
    sizes = (*x_TD.shape, *scores_TK.shape, *tensors[0].shape)
    if not all(isinstance(size, int) for size in sizes):
        return
    num_ranks = group_named(group).size() if group else 1
    options = options_from_spec(spec)
    shape = layer_shape(x_TD, scores_TK, ExpertWeights(*tensors), num_ranks, options)
    memory = memory_of(shape, options, _device.get() or x_TD.device)
    rows_bytes = shape.num_tokens * shape.rows_bytes
    _touch(x_TD, memory.total_bytes - memory.result_bytes - rows_bytes)


def _touch(like: torch.Tensor, num_bytes: int) -> None:
    like.new_empty(max(0, num_bytes), dtype=torch.uint8)
