"""What happens between backward and the optimizer step: loads are agreed on, biases move.

One all-reduce over all ranks gives every rank the same statistics of every layer. From them
non-finite router logits stop the step on all ranks, and the biases of auxiliary-loss-free balancing
(arXiv:2408.15664) move; the trainer logs the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

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


class NonFiniteRouterError(RuntimeError):
    """A router produced NaN or infinity; raised on every rank before the weights change."""


def moe_layers(model_parts: list[nn.Module]) -> Iterator[tuple[int, MoE]]:
    """Every MoE layer on this rank with its index in the whole model."""
    for part in model_parts:
        for name, module in part.named_modules():
            if isinstance(module, MoE):
                yield int(name.split("layers.")[1].split(".")[0]), module


class BalanceStep:
    """Gathers every layer's load once per optimizer step and moves the balancing biases.

    Args:
        model_parts: this rank's parts of the model.
        layer_ids: the layers of the whole model that have experts.
        num_experts: experts per MoE layer.
        num_copies: how many ranks count each token (more than one where tensor parallelism
            repeats tokens).
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        *,
        layer_ids: Sequence[int],
        num_experts: int,
        num_copies: int,
        device: torch.device,
    ) -> None:
        self._layers = list(moe_layers(model_parts))
        self._layer_ids = tuple(layer_ids)
        self._row_of_layer = {layer: row for row, layer in enumerate(self._layer_ids)}
        self._num_experts = num_experts
        self._num_copies = num_copies
        self._device = device
        self.step = 0
        self.stats: LayerStats | None = None

    def __call__(self, *_: object) -> None:
        """The optimizer's step pre-hook.

        Raises:
            NonFiniteRouterError: on every rank, naming the layers.
        """
        table = torch.zeros(
            len(self._layer_ids), self._num_experts + 3, dtype=torch.float64, device=self._device
        )
        for layer, moe in self._layers:
            table[self._row_of_layer[layer]] = moe.meter.read(self._device)
            moe.meter.reset()
        dist.all_reduce(table)
        rows = table / self._num_copies
        self.stats = LayerStats(
            layer_ids=self._layer_ids,
            tokens_LE=rows[:, : self._num_experts],
            aux_loss_L=rows[:, -3],
            z_loss_L=rows[:, -2],
            nonfinite_L=rows[:, -1],
        )
        self._stop_on_nonfinite(self.stats)
        self._move_biases(self.stats)

    def _stop_on_nonfinite(self, stats: LayerStats) -> None:
        bad = [
            f"layer {layer} ({int(count)} tokens)"
            for layer, count in zip(stats.layer_ids, stats.nonfinite_L.tolist(), strict=True)
            if count
        ]
        if bad:
            raise NonFiniteRouterError(
                f"step {self.step}: router logits are NaN or infinite in {', '.join(bad)}; "
                "stopped on all ranks before the weights changed. Lower optimizer.lr or resume "
                "from an earlier checkpoint (checkpoint.load_step)."
            )

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
