"""Load balancing: the auxiliary loss, the router z-loss, and what each layer's router did.

Both losses are written as sums over tokens divided by the number of valid tokens in the whole
global batch, so their gradients do not depend on how the batch is cut into microbatches and ranks.

    aux = E * sum_t sum_e f_e(s(t)) * p_te / num_tokens
    z   = sum_t logsumexp(logits_t)^2 / num_tokens

p_te is the router's probability, f_e(s) the share of assignments that expert e got among the tokens
of scope s: the token's own sequence, or all tokens of a microbatch on all ranks. f carries no
gradient. A perfectly balanced router has aux = 1 (Switch Transformer, arXiv:2101.03961, eq. 4,
generalised to top-k; by sequence: DeepSeek-V3, arXiv:2412.19437, eq. 17). z: ST-MoE,
arXiv:2202.08906, eq. 5. The losses of all layers are added.

Padding takes part in none of it. What was routed is recorded in the backward pass, which runs once
per training token whatever is recomputed and never in evaluation.

Shape suffixes: B batch, L tokens, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from titan_relay.titan.model.router import Routing

AuxLossScope = Literal["sequence", "batch"]


@dataclass
class StepContext:
    """What the layers must know of the step they run in; shared by all layers, set by the trainer.

    num_valid_tokens: valid tokens in the global batch (all ranks, all microbatches), a scalar.
    sequence_groups: process groups whose ranks hold parts of the same sequences.
    batch_groups: process groups whose ranks together hold a microbatch's sequences.
    """

    num_valid_tokens: torch.Tensor | None = None
    sequence_groups: Sequence[dist.ProcessGroup] = field(default_factory=tuple)
    batch_groups: Sequence[dist.ProcessGroup] = field(default_factory=tuple)


@dataclass
class LoadMeter:
    """What one layer's router did since the last `reset`, over this rank's training tokens.

    values: float64 `(E + 3,)`: tokens per expert, aux loss, z-loss (both before their
    coefficients, already divided by the global number of tokens), tokens with a non-finite logit.
    """

    num_experts: int
    values: torch.Tensor | None = None

    def record(self, values: torch.Tensor) -> None:
        """Add one microbatch's values."""
        self.values = values.clone() if self.values is None else self.values + values

    def read(self, device: torch.device) -> torch.Tensor:
        """The values so far; zeros if nothing was recorded."""
        if self.values is None:
            return torch.zeros(self.num_experts + 3, dtype=torch.float64, device=device)
        return self.values

    def reset(self) -> None:
        """Start a new step."""
        self.values = None


class _AttachLoss(torch.autograd.Function):
    """Identity on the scores; its backward adds the balancing losses' gradient and records."""

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, loss: torch.Tensor, values: torch.Tensor, meter: LoadMeter
    ) -> torch.Tensor:
        ctx.meter = meter
        ctx.save_for_backward(loss, values)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        loss, values = ctx.saved_tensors
        ctx.meter.record(values)
        return grads[0], torch.ones_like(loss), None, None


@dataclass(frozen=True)
class BalanceLoss:
    """The balancing losses of one layer."""

    num_experts: int
    aux_loss_coeff: float
    z_loss_coeff: float
    aux_loss_scope: AuxLossScope

    def attach(
        self,
        routing: Routing,
        valid_BL: torch.Tensor,
        context: StepContext,
        meter: LoadMeter,
    ) -> torch.Tensor:
        """Return `routing.scores_BLK` with the losses attached to its gradient.

        Args:
            routing: this rank's routing; float32 scores.
            valid_BL: which tokens count; the others are padding.
            context: normalisation and the groups that share sequences.
            meter: where the backward pass records the layer's load.

        Synchronises: one all-reduce of per-expert counts over the scope's groups, only with the
        auxiliary loss on and the scope spread over ranks.
        """
        valid_BL1 = valid_BL.to(torch.float32).unsqueeze(-1)
        counts_BE = count_assignments(routing.expert_ids_BLK, valid_BL, self.num_experts)
        num_tokens = context.num_valid_tokens
        if num_tokens is None:  # outside a trainer: this call is the whole batch
            num_tokens = valid_BL.sum().clamp(min=1)
        z = (torch.logsumexp(routing.logits_BLE, dim=-1, keepdim=True) ** 2 * valid_BL1).sum()
        z = z / num_tokens
        aux = self._aux_loss(routing.probs_BLE, valid_BL1, counts_BE, context) / num_tokens
        nonfinite = (~torch.isfinite(routing.logits_BLE)).any(dim=-1) & valid_BL
        values = torch.cat(
            [
                counts_BE.sum(dim=0).double(),
                torch.stack([aux.detach().double(), z.detach().double(), nonfinite.sum().double()]),
            ]
        )
        loss = aux * self.aux_loss_coeff + z * self.z_loss_coeff
        scores: torch.Tensor = _AttachLoss.apply(routing.scores_BLK, loss, values, meter)
        return scores

    def _aux_loss(
        self,
        probs_BLE: torch.Tensor,
        valid_BL1: torch.Tensor,
        counts_BE: torch.Tensor,
        context: StepContext,
    ) -> torch.Tensor:
        """E * sum over tokens and experts of f * p, not yet divided by the number of tokens."""
        by_sequence = self.aux_loss_scope == "sequence"
        share_BE = counts_BE.float() if by_sequence else counts_BE.sum(0, keepdim=True).float()
        if self.aux_loss_coeff > 0:
            for group in context.sequence_groups if by_sequence else context.batch_groups:
                dist.all_reduce(share_BE, group=group)
        share_BE = share_BE / share_BE.sum(dim=1, keepdim=True).clamp(min=1)
        # Sigmoid scores do not sum to one over the experts; probabilities do.
        probs_BLE = probs_BLE / probs_BLE.sum(dim=-1, keepdim=True).clamp(min=1e-20)
        return (share_BE.unsqueeze(1) * probs_BLE * valid_BL1).sum() * self.num_experts


def count_assignments(
    expert_ids_BLK: torch.Tensor, valid_BL: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """How many valid tokens of each sequence went to each expert: int64 `(B, E)`.

    Example: ids [[[0], [2], [2]]], valid [[1, 1, 0]], 3 experts -> [[1, 0, 1]].
    """
    ids_BN = expert_ids_BLK.flatten(1)
    weight_BN = valid_BL.long().unsqueeze(-1).expand_as(expert_ids_BLK).flatten(1)
    counts_BE = ids_BN.new_zeros(ids_BN.shape[0], num_experts)
    return counts_BE.scatter_add(1, ids_BN, weight_BN)
