"""Curves of the rows that are trained on: the largest rank's loss, and the tokens of the whole run.

torchtitan has both, but divides a rank's loss by tokens from before context parallelism cuts its
rows, and goes on with one rank's count of tokens after a resume on any number of ranks.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from titan_relay.data import IGNORE_INDEX

_OF_ALL_RANKS = " of all ranks"


class RowCurves:
    """Follows the microbatches that the trainer trains on; curves of the metrics processor.

    Ranks that hold parts of the same rows (context parallelism), or repeat them (tensor
    parallelism), are one: their losses and tokens are summed before they are divided. Rows that
    are all padding are left out.

    Args:
        parallel_dims: the layout of the ranks.
        has_loss: whether this rank's loss is one; only the last pipeline stage's is.
        tokens_per_step: of all ranks, padding included.
        device: where losses are.
    """

    def __init__(
        self,
        parallel_dims: ParallelDims,
        *,
        has_loss: bool,
        tokens_per_step: int,
        device: torch.device,
    ) -> None:
        mesh = parallel_dims.get_optional_mesh("batch")
        self._place = 0 if mesh is None else mesh.get_local_rank()
        self._num_places = 1 if mesh is None else mesh.size()
        self._num_parts = self._num_places * parallel_dims.cp
        self._has_loss, self._tokens_per_step = has_loss, tokens_per_step
        self._tokens_before = self._num_tokens = 0
        self._device = device
        self.begin_step(is_reported=False)

    def begin_step(self, *, is_reported: bool) -> None:
        """A step begins; losses are summed, on their device, if it is reported."""
        self._is_reported = is_reported
        if not is_reported:
            return
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._valid_tokens = torch.zeros((), dtype=torch.int64, device=self._device)

    def add_labels(self, labels_BL: torch.Tensor) -> None:
        """Count a microbatch's tokens by the labels of this rank's part of it."""
        self._num_tokens += labels_BL.numel()
        if self._is_reported:
            self._valid_tokens += (labels_BL != IGNORE_INDEX).sum()

    def add_loss(self, loss: torch.Tensor, num_valid_tokens: torch.Tensor) -> None:
        """Add this rank's part of a loss, which was divided by the global batch's tokens."""
        if self._is_reported:
            self._loss_sum += loss.double().sum() * num_valid_tokens

    def curves(self) -> dict[str, float]:
        """Of the step that is reported; collective over all ranks, and the same on each."""
        table_2P = torch.zeros(2, self._num_places, dtype=torch.float64, device=self._device)
        if self._has_loss:
            table_2P[:, self._place] = torch.stack([self._loss_sum, self._valid_tokens.double()])
        dist.all_reduce(table_2P)
        losses, tokens = table_2P.tolist()
        means = [loss / count for loss, count in zip(losses, tokens, strict=True) if count]
        curves = {"n_tokens_seen": float(self._tokens_seen())}
        if all(map(math.isfinite, means)):
            return curves | {"loss_metrics/global_max_loss": max(means)}
        # A step that was skipped: the trainer's mean leaves out what is not finite.
        names = ("loss_metrics/global_avg_loss", "loss_metrics/global_max_loss")
        return curves | dict.fromkeys(names, math.nan)

    def saved_tokens(self) -> str:
        """What a checkpoint keeps of the tokens: not one rank's number, as it once was."""
        return f"{self._tokens_seen()}{_OF_ALL_RANKS}"

    def load_tokens(self, saved: str | int, step: int) -> None:
        """Go on after `step` from what a checkpoint kept.

        An older checkpoint kept a number of one rank: then every step is taken to have had as many
        tokens as this run's.
        """
        if isinstance(saved, str):
            self._tokens_before = int(saved.partition(_OF_ALL_RANKS)[0])
        else:
            self._tokens_before = step * self._tokens_per_step
        self._num_tokens = 0

    def _tokens_seen(self) -> int:
        return self._tokens_before + self._num_tokens * self._num_parts
