"""Inputs of checkpointed blocks in host memory between forward and backward.

What a checkpointed block keeps on the device is its input. Here it is copied to the host while the
next block computes, and back while, in backward, the block after it does. Copies run on a stream of
their own; the device holds at most one block's input ahead of need. Buffers are reused and bounded,
and an input for which there is no room stays on the device.

On a machine without a device the same code copies at once.
"""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from titan_relay.measure.storages import host_allocation


class HostInputs:
    """Keeps block inputs in up to `budget_bytes` of host memory."""

    def __init__(self, budget_bytes: int) -> None:
        self._has_device = torch.cuda.is_available()
        self.buffers = HostBuffers(budget_bytes, pinned=self._has_device)
        self._latest: weakref.ref[_Kept] | None = None

    def around(self, layer: int, x: torch.Tensor) -> saved_tensors_hooks:
        """Hooks to put around the checkpointed call of a block with input `x`.

        A checkpoint saves its arguments through the hooks around it, and all that the block itself
        saves through its own.
        """

        kind = x.shape, x.dtype  # the hooks live as long as what they pack: not `x` itself

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Kept:
            if (tensor.shape, tensor.dtype) != kind:
                return tensor  # positions
            return self._to_host(layer, tensor)

        return saved_tensors_hooks(pack, _unpack)

    def _to_host(self, layer: int, x: torch.Tensor) -> torch.Tensor | _Kept:
        local = x.to_local() if isinstance(x, DTensor) else x
        local = local.detach()
        buffer = self.buffers.take(local.nbytes)
        if buffer is None:
            return x
        previous = None if self._latest is None else self._latest()
        if previous is not None and previous.layer >= layer:
            previous = None  # of another microbatch
        kept = _Kept(layer, x, local, buffer, self._side_stream, previous)
        weakref.finalize(kept, self.buffers.give_back, buffer)
        self._latest = weakref.ref(kept)
        return kept

    @cached_property
    def _side_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream() if self._has_device else None


class HostBuffers:
    """Flat byte buffers in host memory, pinned beside a CUDA device, reused by size.

    Args:
        budget_bytes: never are more bytes allocated.
        pinned: lock the pages, so that a device copies without waiting for the host.
    """

    def __init__(self, budget_bytes: int, *, pinned: bool) -> None:
        self.budget_bytes = budget_bytes
        self.allocated_bytes = 0
        self._pinned = pinned
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """A buffer of that size, or None if the budget has no room for it."""
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        if self.allocated_bytes + num_bytes > self.budget_bytes:
            return None
        self.allocated_bytes += num_bytes
        with host_allocation():
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let the buffer be used again; nothing may still read or write it."""
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def shrink(self, num_bytes: int) -> int:
        """Free as many unused buffers as make at most `num_bytes`, and none are allocated again.

        Returns their bytes.
        """
        freed_bytes = 0
        for size, buffers in self._free.items():
            while buffers and freed_bytes + size <= num_bytes:
                buffers.pop()
                freed_bytes += size
        self.allocated_bytes -= freed_bytes
        self.budget_bytes = self.allocated_bytes
        return freed_bytes


def _unpack(packed: torch.Tensor | _Kept) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else packed.take()


class _Kept:
    """One block input on the host.

    layer: the block's place. previous: the input that backward will ask for after this one.
    """

    def __init__(
        self,
        layer: int,
        x: torch.Tensor,
        local: torch.Tensor,
        buffer: torch.Tensor,
        stream: torch.cuda.Stream | None,
        previous: _Kept | None,
    ) -> None:
        self.layer = layer
        self._previous = None if previous is None else weakref.ref(previous)
        self._layout: Any = (x.device_mesh, x.placements) if isinstance(x, DTensor) else None
        self._shape, self._dtype, self._device = local.shape, local.dtype, local.device
        self._stream = stream
        self._host = buffer.view(local.dtype).view(local.shape)
        self._fetched: torch.Tensor | None = None
        self._was_taken = False
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            # The allocator must not hand the input's memory on before the copy has read it.
            local.record_stream(stream)
        with torch.cuda.stream(stream):
            self._host.copy_(local, non_blocking=True)

    def prefetch(self) -> None:
        """Start the copy to the device."""
        if self._fetched is not None:
            return
        # In the order of the stream: after the copy to the host, and after earlier fetches. Without
        # one this changes nothing, and copies end at once.
        with torch.cuda.stream(self._stream):
            self._fetched = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._fetched.copy_(self._host, non_blocking=True)

    def take(self) -> torch.Tensor:
        """The input on the device; starts to fetch the one before."""
        self.prefetch()
        tensor, self._fetched, self._was_taken = self._fetched, None, True
        assert tensor is not None
        if self._stream is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self._stream)
            # Made on the side stream, used on this one.
            tensor.record_stream(current)
        previous = None if self._previous is None else self._previous()
        if previous is not None and not previous._was_taken:
            previous.prefetch()
        if self._layout is None:
            return tensor
        mesh, placements = self._layout
        return DTensor.from_local(tensor, mesh, placements, run_check=False)
