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

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint, noop_context_fn

from titan_relay.private_torch import saves_tensors, sequence_number, tree_leaves
from titan_relay.recompute.frame import ContextFn, Frame, Keeps, current_frame


def relay_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    keeps: Callable[[], Keeps] = Keeps,
    context_fn: ContextFn = noop_context_fn,
    **kwargs: Any,
) -> Any:
    """``torch.utils.checkpoint.checkpoint(use_reentrant=False)`` that never recomputes a relay.

    Args:
        function: typically a transformer block; called with ``args``.
        keeps: asked in each forward, what it keeps for backward besides the arguments.
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
    kept = keeps()
    frame = Frame(kept)
    kwargs["context_fn"] = frame.contexts_in(context_fn)
    with nullcontext() if kept.host is None else kept.host.around(kept.layer, args[0]):
        outputs = checkpoint(function, *args, use_reentrant=False, **kwargs)
    frame.value_needed = _value_needed(outputs, frame.skippable)
    # The frame is referenced by the graph from here on, so it must not reference the graph.
    frame.skippable.clear()
    return outputs


def note_relay_output(out_TD: torch.Tensor) -> None:
    """Tell the surrounding block, if any, which node of the graph is a relay."""
    frame = current_frame()
    if frame is not None and not frame.recomputing and out_TD.grad_fn is not None:
        frame.skippable.append(out_TD.grad_fn)


def value_is_needed() -> bool:
    """False while a block is recomputed in which nobody uses the relay's value."""
    frame = current_frame()
    return frame is None or not frame.recomputing or frame.value_needed


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
