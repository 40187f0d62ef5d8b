"""Activation checkpointing around a relay: the recompute of a block runs neither ring nor experts.

The relay's gradient needs the relay's inputs, not its output. In a pre-norm block nothing else
needs the output's value either: a residual add saves nothing. So while such a block is recomputed,
the op saves its inputs and returns zeros, with no message and no expert computed.

Whether a block is of that kind is read off the autograd graph right after its forward: if a node
between the relay and the block's outputs saved a tensor for its own backward (a norm after the
MoE, an elementwise product), that tensor may depend on the relay's value, and the recompute of
this block does the real thing. The graph cannot show a use that has no gradient at all, such as
``x * (moe(x) > 0)``; such a block needs plain ``torch.utils.checkpoint``.
"""

import contextlib
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint, noop_context_fn

from titan_relay.private_torch import saves_tensors, sequence_number, tree_leaves

ContextFn = Callable[
    [], tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]
]


@dataclass
class _Block:
    """One checkpointed forward and its recompute."""

    recomputing: bool = False
    value_needed: bool = False
    relays: list[Node] = field(default_factory=list)


# The checkpointed block being run by this thread, if any. Set and reset by the context managers
# below; a context variable is how a registered op learns of the code around it.
_block: ContextVar[_Block | None] = ContextVar("titan_relay_checkpointed_block", default=None)


def relay_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    context_fn: ContextFn = noop_context_fn,
    **kwargs: Any,
) -> Any:
    """``torch.utils.checkpoint.checkpoint(use_reentrant=False)`` that never recomputes a relay.

    Args:
        function: typically a transformer block; called with ``args``.
        context_fn: as in ``torch.utils.checkpoint``, for selective checkpointing. The relay's ops
            (``relay_ops()``) need not be in its save list: saving their output would cost one
            copy of the tokens per layer.
        kwargs: of ``torch.utils.checkpoint`` (``preserve_rng_state``, ``determinism_check``,
            ``early_stop``, ...) or of ``function``.

    It can be given to ``checkpoint_wrapper(module, checkpoint_fn=relay_checkpoint)``. Under
    ``torch.compile`` it is plain checkpointing: there the compiler drops the relay's forward from
    the recompute because nothing uses it.
    """
    kwargs.pop("use_reentrant", None)
    if torch.compiler.is_compiling():
        if context_fn is not noop_context_fn:
            kwargs["context_fn"] = context_fn
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    block = _Block()

    def contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        forward_context, recompute_context = context_fn()
        return (
            _Running(block, forward_context, recomputing=False),
            _Running(block, recompute_context, recomputing=True),
        )

    outputs = checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    block.value_needed = _value_needed(outputs, block.relays)
    # The block is referenced by the graph from here on, so it must not reference the graph.
    block.relays.clear()
    return outputs


def note_relay_output(out_TD: torch.Tensor) -> None:
    """Tell the surrounding block, if any, which node of the graph is a relay."""
    block = _block.get()
    if block is not None and not block.recomputing and out_TD.grad_fn is not None:
        block.relays.append(out_TD.grad_fn)


def value_is_needed() -> bool:
    """False while a block is recomputed in which nobody uses the relay's value."""
    block = _block.get()
    return block is None or not block.recomputing or block.value_needed


class _Running(contextlib.AbstractContextManager):
    """The forward or the recompute of a block; the latter once for every backward."""

    def __init__(
        self, block: _Block, inner: contextlib.AbstractContextManager, *, recomputing: bool
    ) -> None:
        self._block, self._inner, self._recomputing = block, inner, recomputing
        self._tokens: list[Token[_Block | None]] = []

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._block.recomputing = self._recomputing
        self._tokens.append(_block.set(self._block))

    def __exit__(self, *exc_info: Any) -> bool | None:
        _block.reset(self._tokens.pop())
        return self._inner.__exit__(*exc_info)


def _value_needed(outputs: Any, relays: list[Node]) -> bool:
    """Whether a node between a relay and the outputs saved a tensor for its backward."""
    if not relays:
        return False
    oldest = min(sequence_number(relay) for relay in relays)
    roots = [
        leaf.grad_fn
        for leaf in tree_leaves(outputs)
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    return any(saves_tensors(node) for node in _nodes_above(roots, relays, oldest))


def _nodes_above(roots: list[Node], relays: list[Node], oldest: int) -> list[Node]:
    """The nodes on a path from a root to a relay, relays excluded.

    A node made before the oldest relay cannot depend on one; the walk stops there, so that it
    stays inside the block.
    """
    relay_set = set(relays)
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        if node not in relay_set and sequence_number(node) >= oldest:
            stack += [(below, False) for below, _ in node.next_functions if below is not None]
    reaching = set(relay_set)
    for node in order:  # children first
        if any(below in reaching for below, _ in node.next_functions):
            reaching.add(node)
    return [node for node in reaching if node not in relay_set]
