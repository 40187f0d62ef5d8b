"""Decisions that a checkpointed block keeps, such as the experts that a router chose.

A recompute must not decide again: two close values may then compare the other way, and gradients
belong to other experts than the output did.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from titan_relay.recompute.frame import current_frame


def keep_decision(choice: torch.Tensor, num_options: int) -> torch.Tensor:
    """`choice`, or in a recompute what it was the first time.

    Args:
        choice: integers in [0, num_options), any shape.

    Kept: one byte a choice among up to 256, else two or four.
    """
    if isinstance(choice, DTensor):
        local = keep_decision(choice.to_local(), num_options)
        return DTensor.from_local(local, choice.device_mesh, choice.placements, run_check=False)
    if torch.compiler.is_compiling():
        # A compiler must not take the frame that it finds for a constant.
        kept_in_graph: torch.Tensor = _keep_decision_in_graph(choice, num_options)
        return kept_in_graph
    frame = current_frame()
    if frame is None:
        return choice
    number = next(frame.numbers)
    if frame.recomputing:
        return frame.decisions[number].to(choice.dtype)
    frame.decisions[number] = choice.to(_narrowest(num_options))
    return choice


@torch.library.custom_op("titan_relay::keep_decision", mutates_args=())
def _keep_decision_in_graph(choice: torch.Tensor, num_options: int) -> torch.Tensor:
    """`keep_decision` as one step of a compiled graph, which asks for the frame when it runs."""
    kept = keep_decision(choice, num_options)
    return kept.clone() if kept is choice else kept


@_keep_decision_in_graph.register_fake
def _(choice: torch.Tensor, num_options: int) -> torch.Tensor:
    return torch.empty_like(choice)


def _narrowest(num_options: int) -> torch.dtype:
    if num_options <= 2**8:
        return torch.uint8
    return torch.int16 if num_options <= 2**15 else torch.int32
