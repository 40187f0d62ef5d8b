"""What happens between backward and the optimizer step: loads are agreed on, biases move.

One all-reduce over all ranks gives every rank the same statistics of every layer. From them a step
with numbers that are not finite is refused on all ranks (see `finite`), and the biases of
auxiliary-loss-free balancing (arXiv:2408.15664) move; the trainer logs the rest. What a
rank asks of all, such as to end early, travels with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from titan_relay.titan.model.finite import FiniteCheck
from titan_relay.titan.model.moe import MoE


@dataclass(frozen=True)
class LayerStats:
    """Global statistics of one optimizer step, a row per MoE layer of the whole model.

    layer_ids: each row's layer. tokens_LE: tokens per expert. aux_loss_L, z_loss_L: before their
    coefficients. nonfinite_L: tokens with a non-finite router logit.
    """

    layer_ids: tuple[int, ...]
    tokens_LE: torch.Tensor
    aux_loss_L: torch.Tensor
    z_loss_L: torch.Tensor
    nonfinite_L: torch.Tensor


def moe_layers(model_parts: list[nn.Module]) -> Iterator[tuple[int, MoE]]:
    """Every MoE layer on this rank with its index in the whole model."""
    for part in model_parts:
        for name, module in part.named_modules():
            if isinstance(module, MoE):
                yield int(name.split("layers.")[1].split(".")[0]), module


class BalanceStep:
    """Gathers every layer's load once per optimizer step and moves the balancing biases, unless the
    step is not applied because of numbers that are not finite.

    Args:
        model_parts: this rank's parts of the model.
        check: what this rank has found of the step's loss and gradients; told of steps that are
            not applied, which end the run or are skipped.
        layer_ids: the layers of the whole model that have experts.
        num_experts: experts per MoE layer.
        num_copies: how many ranks count each token (more than one where tensor parallelism
            repeats tokens).
        requests: what this rank asks of all ranks, read once per step; as many on every rank.

    Attributes:
        asked: of each request, whether any rank made it in the last step; the same on every rank.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        *,
        check: FiniteCheck,
        layer_ids: Sequence[int],
        num_experts: int,
        num_copies: int,
        device: torch.device,
        requests: Callable[[], Sequence[bool]] = tuple,
    ) -> None:
        self._requests = requests
        self.asked: tuple[bool, ...] = ()
        self._model_parts, self._check = model_parts, check
        self._layers = list(moe_layers(model_parts))
        self._layer_ids = tuple(layer_ids)
        self._row_of_layer = {layer: row for row, layer in enumerate(self._layer_ids)}
        self._num_experts = num_experts
        self._num_copies = num_copies
        self._device = device
        self.step = 0
        self.stats: LayerStats | None = None

    def __call__(self, *_: object) -> None:
        """The optimizer's step pre-hook. Synchronises: one all-reduce, one read of its result.

        Raises:
            NonFiniteStepError: on every rank, if a step that is not finite may not be skipped.
        """
        table = torch.zeros(
            len(self._layer_ids), self._num_experts + 3, dtype=torch.float64, device=self._device
        )
        for layer, moe in self._layers:
            table[self._row_of_layer[layer]] = moe.meter.read(self._device)
            moe.meter.reset()
        findings = self._check.findings((table[:, -1] > 0).any())
        requests = self._requests()
        asked = findings.new_zeros(len(requests))
        for place, is_asked in enumerate(requests):
            if is_asked:  # a tensor of them all would be a copy that waits for the device
                asked[place] = 1.0
        summed = torch.cat([table.flatten(), asked, findings])
        dist.all_reduce(summed)
        rows = summed[: table.numel()].view_as(table) / self._num_copies
        self.stats = LayerStats(
            layer_ids=self._layer_ids,
            tokens_LE=rows[:, : self._num_experts],
            aux_loss_L=rows[:, -3],
            z_loss_L=rows[:, -2],
            nonfinite_L=rows[:, -1],
        )
        # One read for all: tokens with bad logits by layer, what is asked, what is not finite.
        values = torch.cat([rows[:, -1], summed[table.numel() :]]).tolist()
        num_layers, end = len(rows), len(rows) + len(asked)
        self.asked = tuple(count > 0 for count in values[num_layers:end])
        bad_logits = dict(zip(self._layer_ids, values[:num_layers], strict=True))
        found = self._check.in_words(values[end:], bad_logits)
        if found is None:
            self._move_biases(self.stats)
            return
        self._check.skipped.add(self.step, found)
        for part in self._model_parts:  # an optimizer leaves alone what has no gradient
            part.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _move_biases(self, stats: LayerStats) -> None:
        for layer, moe in self._layers:
            bias = moe.expert_bias_E
            if bias is None or moe.load_balance_coeff is None:
                continue
            tokens_E = stats.tokens_LE[self._row_of_layer[layer]].float()
            step_E = torch.sign(tokens_E.mean() - tokens_E) * moe.load_balance_coeff
            local = bias.to_local() if hasattr(bias, "to_local") else bias
            local.add_(step_E - step_E.mean())
