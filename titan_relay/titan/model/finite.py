"""Whether a step may be applied: loss, gradients and router logits must be numbers on every rank.

What a rank finds goes into a vector of one place per layer and one per rank, which rides on the
reduction of the routers' loads (see `balance_hook`): all ranks come to the same answer in the
same step, and read it from the device together with the loads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.tools.logging import logger

from titan_relay.titan.model.experts import local_part

_LOSS, _GRADIENT, _LOGITS = 1, 2, 4  # bits of a rank's mark
_MOST_NAMED = 4
_SKIPPED = ", steps skipped: "
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class NonFiniteStepError(RuntimeError):
    """A step or a checkpoint would hold NaN or infinity; raised alike on every rank, before weights
    or files change."""


class FiniteCheck:
    """What this rank finds in one step, and what all found; `skipped` are the steps so far that
    were not applied because of it.

    Args:
        model_parts: this rank's parts of the model.
        max_skipped: steps that may be left out before one ends the run.
        num_layers: of the whole model.
        device: where the findings are gathered.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        *,
        num_layers: int,
        max_skipped: int,
        device: torch.device,
    ) -> None:
        self.skipped = SkippedSteps(max_skipped)
        self._num_layers, self._device = num_layers, device
        self._parameters: dict[int, list[nn.Parameter]] = {}
        for part in model_parts:
            for name, parameter in part.named_parameters():
                layer = _LAYER.search(name)
                row = num_layers if layer is None else int(layer[1])
                self._parameters.setdefault(row, []).append(parameter)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step."""
        self._bad_loss = torch.zeros((), dtype=torch.bool, device=self._device)
        self._squares_L = torch.zeros(
            self._num_layers + 1, dtype=torch.float64, device=self._device
        )

    def add_loss(self, loss: torch.Tensor) -> None:
        """Look at this rank's loss of a microbatch."""
        self._bad_loss |= ~torch.isfinite(local_part(loss)).all()

    def add_gradients(self) -> None:
        """Look at what this rank holds of the step's gradients; before they are clipped, because
        clipping to a norm that is NaN makes all of them NaN."""
        for row, parameters in self._parameters.items():
            grads = [local_part(each.grad) for each in parameters if each.grad is not None]
            grads = [grad for grad in grads if grad.numel()]
            if grads:
                self._squares_L[row] = torch.nn.utils.get_total_norm(grads).double() ** 2

    def findings(self, bad_logits: torch.Tensor) -> torch.Tensor:
        """float64 `(num_layers + 1 + ranks,)`, to be summed over ranks: squares of gradient norms
        by layer, what is outside the layers last, and a mark for this rank.

        bad_logits: a bool scalar, whether this rank's routers had a logit that is no number.
        """
        marks_R = self._squares_L.new_zeros(dist.get_world_size())
        bad_gradient = ~torch.isfinite(self._squares_L.float()).all()
        bits = (self._bad_loss, _LOSS), (bad_gradient, _GRADIENT), (bad_logits, _LOGITS)
        marks_R[dist.get_rank()] = sum(is_bad.double() * bit for is_bad, bit in bits)
        return torch.cat([self._squares_L, marks_R])

    def in_words(self, summed: Sequence[float], bad_logits: Mapping[int, float]) -> str | None:
        """What was not finite, and on which ranks; None for a sound step.

        summed: the sum of all ranks' `findings`.
        bad_logits: tokens with a logit that is no number, by layer.
        """
        squares, marks = summed[: self._num_layers + 1], summed[self._num_layers + 1 :]
        found = []
        layers = [
            f"layer {layer} ({int(count)} tokens)" for layer, count in bad_logits.items() if count
        ]
        if layers:
            found.append(f"router logits in {', '.join(layers)}{_where(marks, _LOGITS)}")
        if _ranks(marks, _LOSS):
            found.append(f"the loss{_where(marks, _LOSS)}")
        # Norms that float32 cannot hold make clipping multiply by 0.
        rows = [row for row, square in enumerate(squares) if not _fits(square)]
        if rows:
            found.append(f"the gradient of {self._parts(rows)}{_where(marks, _GRADIENT)}")
        elif not _fits(sum(squares)):
            found.append("the norm of the gradient")
        if not found:
            return None
        return f"NaN or infinity in {' and in '.join(found)}"

    def _parts(self, rows: list[int]) -> str:
        layers = [str(row) for row in rows if row < self._num_layers]
        parts = [f"layer{'s' * (len(layers) > 1)} {_listed(layers)}"] if layers else []
        parts += ["embedding, head or last norm"] * (self._num_layers in rows)
        return " and ".join(parts)


@dataclass
class SkippedSteps:
    """The steps of a run that were not applied: how many there were, and how many there may be."""

    most: int
    count: int = 0

    def curves(self) -> dict[str, float]:
        """For the metrics processor; the same on every rank."""
        return {"skipped_steps": float(self.count)}

    def saved(self) -> str:
        """What a checkpoint keeps, behind the tokens: loading it asks for no key that older ones
        lack. "" without skipped steps."""
        return f"{_SKIPPED}{self.count}" if self.count else ""

    def load(self, saved: str | int) -> None:
        """Go on counting from a text that ends with `saved()`."""
        self.count = int(str(saved).partition(_SKIPPED)[2] or 0)

    def add(self, step: int, found: str) -> None:
        """Count a step that is not applied.

        Raises:
            NonFiniteStepError: there were as many as there may be.
        """
        if self.count >= self.most:
            before = f" ({self.count} skipped before)" if self.count else ""
            raise NonFiniteStepError(
                f"step {step}: {found}; stopped on all ranks before the weights changed, so the "
                "last checkpoint is sound. Lower optimizer.lr, resume from an earlier checkpoint "
                "(checkpoint.load_step), or let the run skip such steps: "
                f"training.max_skipped_steps = {self.most}{before}"
            )
        self.count += 1
        logger.warning(f"step {step} is skipped, {self.count} of at most {self.most}: {found}")


def refuse_nonfinite(state_dict: Mapping[str, Any], path: str | Path) -> None:
    """Raise `NonFiniteStepError` on every rank if a tensor of any is not finite; collective."""
    bad = [
        name
        for name, value in state_dict.items()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and not torch.isfinite(local_part(value)).all()
    ]
    by_rank: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(by_rank, bad[:1])
    for rank, names in enumerate(by_rank):
        if names:
            raise NonFiniteStepError(
                f"{path} is not written: {names[0]} holds NaN or infinity (on rank {rank}); "
                "resume from an earlier checkpoint with a lower optimizer.lr"
            )


def _fits(square: float) -> bool:
    return math.isfinite(square) and square <= torch.finfo(torch.float32).max


def _ranks(marks: Sequence[float], bit: int) -> list[str]:
    return [str(rank) for rank, mark in enumerate(marks) if int(mark) & bit]


def _where(marks: Sequence[float], bit: int) -> str:
    ranks = _ranks(marks, bit)
    return f" on rank{'s' * (len(ranks) > 1)} {_listed(ranks)}" if ranks else ""


def _listed(names: list[str]) -> str:
    """The first few of them: [1, 2, 3, 4, 5, 6] -> "1, 2, 3, 4 and 2 more"."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
