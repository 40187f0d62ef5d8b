"""What a checkpointed block keeps, and what its recompute need not hold on to.

`torch.utils.checkpoint` drops everything that a block saves for backward, and runs the block again
to get all of it back at once. Three things improve on that:

- `retained_call` runs a costly function (an attention kernel, a projection). In a block that keeps
  its kind, its output and what it makes for its own backward are kept, the function is not run
  again, and in the recompute the kept output takes its place. Its inputs are always recomputed.
  That works for every function, compiled ones too, because only the tensors that it saves are
  looked at, not what it does.
- `rebuilt` runs a cheap function (a norm, a rotation) whose results only retained calls save. The
  recompute does not hold them: each is made again from the cheap function's inputs at the moment
  when a retained call's backward asks for it.
- `settled` keeps a decision, such as the experts that a router chose: a recompute must not decide
  again, since two close values may then compare the other way.

All look for the block around them in a context variable, set by the two context managers that
`retention_contexts` hands to `torch.utils.checkpoint`. Outside a checkpointed block they only call
the function. A compiler must not take what they find for a constant: it leaves the first two out
and calls the third as an op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from titan_relay.measure.storages import is_wrapper, plain_tensors
from titan_relay.private_torch import storage_id
from titan_relay.recompute.clock import CallClock

ContextFn = Callable[
    [], tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]
]


@dataclass
class _Frame:
    """One forward of one checkpointed block, and its recompute.

    kinds: the kinds of calls that are kept. clock: times calls of the forward.
    outputs, decisions: what is kept, in order.
    made: by number of a call that is not kept, what its rerun in the recompute saved besides its
    inputs; backward takes it from there. origins: where results of `rebuilt` come from.
    """

    kinds: frozenset[str]
    clock: CallClock | None
    recomputing: bool = False
    outputs: list[_Output | None] = field(default_factory=list)
    decisions: list[torch.Tensor] = field(default_factory=list)
    made: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    origins: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    num_calls: int = 0
    num_outputs: int = 0
    num_decisions: int = 0


@dataclass(frozen=True)
class _Output:
    value: torch.Tensor
    requires_grad: bool


# Set and reset by the context managers below; the only way for code inside a block to know it.
_frame: ContextVar[_Frame | None] = ContextVar("titan_relay_retention", default=None)


def retention_contexts(kinds: frozenset[str], clock: CallClock | None = None) -> ContextFn:
    """A `context_fn` for `torch.utils.checkpoint` that keeps calls of these kinds.

    `clock` times every retained call of the forward, kept or not.
    """

    def contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        frame = _Frame(kinds, clock)
        return _Running(frame, recomputing=False), _Running(frame, recomputing=True)

    return contexts


class _Running(contextlib.AbstractContextManager):
    """The forward or the recompute of a block; the latter once for every backward."""

    def __init__(self, frame: _Frame, *, recomputing: bool) -> None:
        self._frame, self._recomputing = frame, recomputing
        self._tokens: list[Token[_Frame | None]] = []

    def __enter__(self) -> None:
        frame = self._frame
        frame.recomputing = self._recomputing
        frame.num_calls = frame.num_outputs = frame.num_decisions = 0
        frame.origins.clear()
        self._tokens.append(_frame.set(frame))

    def __exit__(self, *exc_info: object) -> None:
        _frame.reset(self._tokens.pop())


@torch.compiler.disable(recursive=False)
def rebuilt(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], *tensors: torch.Tensor
) -> Any:
    """`function(*tensors)`, of which retained calls keep only how to make it again.

    Args:
        function: cheap; gives one tensor or a tuple; draws no random numbers.
        tensors: its inputs that are recomputed or kept; others it may close over.
    """
    frame = _frame.get()
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
        kind: see `retention_contexts`.
        function: gives one tensor and saves for backward at most its inputs, its output and what
            it makes of them. It must not change any of them in place.
        tensors: its differentiable inputs.
    """
    frame = _frame.get()
    if frame is None or not torch.is_grad_enabled():
        return function(*tensors)
    call = _Call(frame, frame.num_calls, tensors, keeps=kind in frame.kinds)
    frame.num_calls += 1
    if frame.recomputing:
        return _call_again(frame, call, function, tensors)
    timing = frame.clock.measure(kind) if frame.clock is not None else contextlib.nullcontext()
    with saved_tensors_hooks(call.pack, call.unpack), timing:
        value = function(*tensors)
    if call.keeps:
        frame.outputs.append(_Output(value.detach(), value.requires_grad))
    return value


def _call_again(
    frame: _Frame,
    call: _Call,
    function: Callable[..., torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """The call in a recompute, whose graph nobody goes back through."""
    if call.keeps:
        index = frame.num_outputs
        frame.num_outputs += 1
        # The frame lets go of it, so that it lives no longer than needed.
        output, frame.outputs[index] = frame.outputs[index], None
        if output is not None:
            return output.value.detach().requires_grad_(output.requires_grad)
        # A second backward over a retained graph.
    with saved_tensors_hooks(call.take, _never):
        return function(*tensors)


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


@dataclass(frozen=True)
class _Made:
    """A saved tensor that the call made, which its rerun makes again."""

    index: int


class _Call:
    """One retained call; `pack` and `unpack` are saved-tensor hooks for its first run."""

    def __init__(
        self, frame: _Frame, number: int, tensors: tuple[torch.Tensor, ...], *, keeps: bool
    ) -> None:
        self._frame, self._number, self.keeps = frame, number, keeps
        self._input_of = {_memory_of(tensor): i for i, tensor in enumerate(tensors)}
        known = [frame.origins.get(tensor) for tensor in tensors]
        rest = _Origin(tuple(t for t, origin in zip(tensors, known, strict=True) if not origin))
        places = iter(range(len(tensors)))
        self._origins: list[tuple[_Origin, int]] = [
            origin if origin is not None else (rest, next(places)) for origin in known
        ]
        self._num_made = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _View | _Made:
        """What to save in the place of `tensor`."""
        index = self._find(tensor)
        if index is not None:
            self._origins[index][0].num_references += 1
            return _View(index, tensor.size(), tensor.stride(), tensor.storage_offset())
        if self.keeps or not self._can_recompute():
            return tensor
        self._num_made += 1
        return _Made(self._num_made - 1)

    def unpack(self, packed: torch.Tensor | _View | _Made) -> torch.Tensor:
        """The tensor that was saved."""
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, _Made):
            if packed.index not in self._frame.made.get(self._number, {}):
                self._any_saved().prepare()
            return self._frame.made[self._number].pop(packed.index)
        origin, index = self._origins[packed.input_index]
        base = origin.answer(index)
        if is_wrapper(type(base)):
            return base.view(packed.size)
        return base.as_strided(packed.size, packed.stride, packed.offset)

    def take(self, tensor: torch.Tensor) -> None:
        """The rerun's saved-tensor hook: hand over what it made to the first run's backward."""
        if self._find(tensor) is None and self._can_recompute() and not self.keeps:
            made = self._frame.made.setdefault(self._number, {})
            made[self._num_made] = tensor
            self._num_made += 1

    def _find(self, tensor: torch.Tensor) -> int | None:
        """Which input `tensor` is a view of, if that can be had again."""
        index = self._input_of.get(_memory_of(tensor))
        if index is None or not self._origins[index][0].is_saved:
            return None
        if is_wrapper(type(tensor)) and not tensor.is_contiguous():
            return None
        return index

    def _can_recompute(self) -> bool:
        return any(origin.is_saved for origin, _ in self._origins)

    def _any_saved(self) -> _Origin:
        return next(origin for origin, _ in self._origins if origin.is_saved)


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


def settled(choice: torch.Tensor, num_options: int) -> torch.Tensor:
    """`choice`, or in a recompute what it was the first time.

    Args:
        choice: integers in [0, num_options), any shape.

    Kept: one byte a choice among up to 256, else two or four.
    """
    if torch.compiler.is_compiling():
        settled_in_graph: torch.Tensor = _settled_in_graph(choice, num_options)
        return settled_in_graph
    frame = _frame.get()
    if frame is None:
        return choice
    if frame.recomputing:
        kept = frame.decisions[frame.num_decisions]
        frame.num_decisions += 1
        return kept.to(choice.dtype)
    frame.decisions.append(choice.to(_narrowest(num_options)))
    return choice


@torch.library.custom_op("titan_relay::settled", mutates_args=())
def _settled_in_graph(choice: torch.Tensor, num_options: int) -> torch.Tensor:
    """`settled` as one step of a compiled graph, which asks for the block when it runs."""
    kept = settled(choice, num_options)
    return kept.clone() if kept is choice else kept


@_settled_in_graph.register_fake
def _(choice: torch.Tensor, num_options: int) -> torch.Tensor:
    return torch.empty_like(choice)


def _narrowest(num_options: int) -> torch.dtype:
    if num_options <= 2**8:
        return torch.uint8
    return torch.int16 if num_options <= 2**15 else torch.int32
