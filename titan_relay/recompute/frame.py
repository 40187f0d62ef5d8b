"""Start here for what a checkpointed block keeps between forward and backward: `Keeps` says what,
`Frame` holds it, all that the block's recompute, and code inside, know of its forward.

`torch.utils.checkpoint` drops what a block saves for backward and runs the block again to get it
back. `relay_checkpoint` puts a frame around both runs. What wants to keep something from one to the
other, or to be skipped in the second, finds it in a context variable: retained calls and rebuilt
inputs (`retained`), decisions (`decisions`), skippable ops (`relay_checkpoint`). Outside a
checkpointed block there is none, and all of these only compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

from titan_relay.recompute.clock import CallClock
from titan_relay.recompute.host_inputs import HostInputs

ContextFn = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


@dataclass(frozen=True)
class Keeps:
    """What a block keeps besides its input and its decisions, and where the input waits.

    calls: the kinds of `retained_call` whose results are kept.
    clock: times every retained call of the forward, kept or not.
    host: keeps the block's input, its first argument, as that of `layer`; None: the device does.
    """

    calls: frozenset[str] = frozenset()
    clock: CallClock | None = None
    host: HostInputs | None = None
    layer: int = 0


@dataclass
class Frame:
    """One forward of one checkpointed block, and its recompute for every backward.

    outputs: of kept calls, by number, until a recompute takes them. decisions: by number.
    made: by number of a call that is not kept and a place in it, what its rerun in the recompute
    saved besides its inputs; backward takes it from there.
    origins: where the results of `rebuilt` come from.
    skippable: ops of the forward whose gradient does not need their value, until the forward's end
    shows whether anything else does (`value_needed`).
    numbers: counts calls and decisions, alike in both runs.
    """

    keeps: Keeps
    recomputing: bool = False
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    decisions: dict[int, torch.Tensor] = field(default_factory=dict)
    made: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    origins: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    skippable: list[Node] = field(default_factory=list)
    value_needed: bool = False
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def contexts_in(self, context_fn: ContextFn) -> ContextFn:
        """For `torch.utils.checkpoint`: this frame inside the contexts of another."""

        def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
            forward, recompute = context_fn()
            return _Run(self, forward, recomputing=False), _Run(self, recompute, recomputing=True)

        return contexts


# Set and reset by `_Run`; a context variable is how a registered op learns of the code around it.
_frame: ContextVar[Frame | None] = ContextVar("titan_relay_checkpointed_block", default=None)


def current_frame() -> Frame | None:
    """Of the checkpointed block that this thread runs, if any."""
    return _frame.get()


class _Run(AbstractContextManager):
    """The forward or the recompute of a block; the latter is entered once for every backward."""

    def __init__(self, frame: Frame, inner: AbstractContextManager, *, recomputing: bool) -> None:
        self._frame, self._inner, self._recomputing = frame, inner, recomputing
        self._tokens: list[Token[Frame | None]] = []

    def __enter__(self) -> None:
        self._inner.__enter__()
        frame = self._frame
        frame.recomputing = self._recomputing
        frame.numbers = itertools.count()
        frame.origins.clear()
        self._tokens.append(_frame.set(frame))

    def __exit__(self, *exc_info: Any) -> bool | None:
        _frame.reset(self._tokens.pop())
        return self._inner.__exit__(*exc_info)
