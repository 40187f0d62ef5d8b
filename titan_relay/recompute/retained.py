"""Calls that a checkpointed block keeps, and inputs that its recompute need not hold on to.

- `retained_call` runs a costly function (an attention kernel, a projection). In a block that keeps
  its kind, its output and what it makes for its own backward are kept, the function is not run
  again, and in the recompute the kept output takes its place. Its inputs are always recomputed.
  That works for every function, compiled ones too, because only the tensors that it saves are
  looked at, not what it does.
- `rebuilt` runs a cheap function (a norm, a rotation) whose results only retained calls save. The
  recompute does not hold them: each is made again from the cheap function's inputs at the moment
  when a retained call's backward asks for it.

A compiler must not take the frame that they find for a constant: it leaves both out. A checkpoint
around them must run its recompute to the end (`early_stop=False`), since what a call makes there
does not pass through it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from titan_relay.measure.storages import is_wrapper, plain_tensors
from titan_relay.private_torch import storage_id
from titan_relay.recompute.frame import Frame, current_frame


@torch.compiler.disable(recursive=False)
def rebuilt(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], *tensors: torch.Tensor
) -> Any:
    """`function(*tensors)`, of which retained calls keep only how to make it again.

    Args:
        function: cheap; gives one tensor or a tuple; draws no random numbers.
        tensors: its inputs that are recomputed or kept; others it may close over.
    """
    frame = current_frame()
    result = function(*tensors)
    if frame is None or not torch.is_grad_enabled():
        return result
    origin = _Origin(tensors, function)
    for index, tensor in enumerate(result if isinstance(result, tuple) else (result,)):
        frame.origins[tensor] = (origin, index)
    return result


@torch.compiler.disable(recursive=False)
def retained_call(
    kind: str, function: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor:
    """`function(*tensors)`, whose output a block that keeps `kind` does not compute twice.

    Args:
        kind: one of `Keeps.calls`, or not.
        function: gives one tensor and saves for backward at most its inputs, its output and what
            it makes of them. It must not change any of them in place.
        tensors: its differentiable inputs.
    """
    frame = current_frame()
    if frame is None or not torch.is_grad_enabled():
        return function(*tensors)
    call = _Call(frame, next(frame.numbers), tensors, keeps=kind in frame.keeps.calls)
    if frame.recomputing:
        # The frame lets go of it, so that it lives no longer than needed; it is not there in a
        # second backward over a retained graph.
        kept = frame.outputs.pop(call.number, None)
        if kept is not None:
            return kept
        # Nobody goes back through a recompute's own graph.
        with saved_tensors_hooks(call.take, _never):
            return function(*tensors)
    clock = frame.keeps.clock
    timing = clock.measure(kind) if clock is not None else contextlib.nullcontext()
    with saved_tensors_hooks(call.pack, call.unpack), timing:
        value = function(*tensors)
    if call.keeps:
        frame.outputs[call.number] = value.detach().requires_grad_(value.requires_grad)
    return value


class _Origin:
    """Tensors saved through the checkpoint, and what a cheap function makes of them on demand."""

    def __init__(
        self, tensors: tuple[torch.Tensor, ...], function: Callable[..., Any] | None = None
    ) -> None:
        self._function = function
        differentiable = any(tensor.requires_grad for tensor in tensors)
        self._token = _Save.apply(*tensors) if differentiable else None
        self.num_references = self._num_answers = 0
        self._tensors: tuple[torch.Tensor, ...] | None = None

    @property
    def is_saved(self) -> bool:
        """Whether the checkpoint has the tensors; not so where nothing needs a gradient."""
        return self._token is not None

    def prepare(self) -> tuple[torch.Tensor, ...]:
        """All tensors, the first time by a recompute of the block."""
        if self._tensors is None:
            assert self._token is not None
            # At once and once per backward, which is how often a checkpoint answers.
            tensors = self._token.grad_fn.saved_tensors
            if self._function is not None:
                with torch.no_grad():
                    made = self._function(*tensors)
                tensors = made if isinstance(made, tuple) else (made,)
            if not self.num_references:
                return tensors
            self._tensors = tensors
        return self._tensors

    def answer(self, index: int) -> torch.Tensor:
        """One tensor; after the last reference to any of them is answered, none is held."""
        tensor = self.prepare()[index]
        self._num_answers += 1
        if self._num_answers == self.num_references:
            self._tensors, self._num_answers = None, 0
        return tensor


@dataclass(frozen=True)
class _View:
    """A saved tensor that is (a view of) an input: where to find it."""

    input_index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any  # int, or symbolic


class _Call:
    """One retained call; `pack` and `unpack` are saved-tensor hooks for its first run.

    In the place of a tensor they save: a view of an input that can be had again, the key in
    `Frame.made` of what the rerun makes again, or else, and where the call is kept, the tensor.
    """

    def __init__(
        self, frame: Frame, number: int, tensors: tuple[torch.Tensor, ...], *, keeps: bool
    ) -> None:
        self._frame, self.number, self.keeps = frame, number, keeps
        self._input_of = {_memory_of(tensor): i for i, tensor in enumerate(tensors)}
        known = [frame.origins.get(tensor) for tensor in tensors]
        rest = _Origin(tuple(t for t, origin in zip(tensors, known, strict=True) if not origin))
        places = iter(range(len(tensors)))
        self._origins: list[tuple[_Origin, int]] = [
            origin if origin is not None else (rest, next(places)) for origin in known
        ]
        saved = (origin for origin, _ in self._origins if origin.is_saved)
        self._any_saved: _Origin | None = next(saved, None)
        self._num_made = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _View | tuple[int, int]:
        """What to save in the place of `tensor`."""
        index = self._find(tensor)
        if index is not None:
            self._origins[index][0].num_references += 1
            return _View(index, tensor.size(), tensor.stride(), tensor.storage_offset())
        return tensor if self.keeps or self._any_saved is None else self._next_made()

    def unpack(self, packed: torch.Tensor | _View | tuple[int, int]) -> torch.Tensor:
        """The tensor that was saved."""
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, tuple):
            if packed not in self._frame.made:
                assert self._any_saved is not None
                self._any_saved.prepare()
            return self._frame.made.pop(packed)
        origin, index = self._origins[packed.input_index]
        base = origin.answer(index)
        if is_wrapper(type(base)):
            return base.view(packed.size)
        return base.as_strided(packed.size, packed.stride, packed.offset)

    def take(self, tensor: torch.Tensor) -> None:
        """The rerun's saved-tensor hook: hand over what it made to the first run's backward."""
        if self._find(tensor) is None and self._any_saved is not None and not self.keeps:
            self._frame.made[self._next_made()] = tensor

    def _next_made(self) -> tuple[int, int]:
        self._num_made += 1
        return self.number, self._num_made

    def _find(self, tensor: torch.Tensor) -> int | None:
        """Which input `tensor` is a view of, if that can be had again."""
        index = self._input_of.get(_memory_of(tensor))
        if index is None or not self._origins[index][0].is_saved:
            return None
        if is_wrapper(type(tensor)) and not tensor.is_contiguous():
            return None
        return index


class _Save(torch.autograd.Function):
    """Saves its inputs for backward, and has none."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("nothing is computed from the inputs' token")


def _memory_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Which memory a tensor, or the tensors inside a wrapper, lie in."""
    return tuple(storage_id(plain.untyped_storage()) for plain in plain_tensors(tensor))


def _never(packed: None) -> torch.Tensor:
    raise AssertionError("a recompute's own graph has no backward")
