"""The mixture-of-experts layer: torchtitan's, with balancing losses and loads counted once.

Shape suffixes: B batch, L tokens, D model dim, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import MoE as TitanMoE

from titan_relay.titan.model.balance import AuxLossScope, BalanceLoss, LoadMeter, StepContext
from titan_relay.titan.model.experts import RelayRoutedExperts, local_part
from titan_relay.titan.model.jitter import jitter
from titan_relay.titan.model.router import Routing


class MoE(TitanMoE):
    """Router, routed experts and optional shared experts.

    Differs from torchtitan's layer in what it measures and adds to the loss, not in what it
    computes: parameter names and layouts are the same.

    `has_expert_bias`: the architecture has a bias on the choice of experts, so the layer has one
    also where no `load_balance_coeff` moves it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanMoE.Config):
        aux_loss_coeff: float = 0.0
        z_loss_coeff: float = 0.0
        aux_loss_scope: AuxLossScope = "sequence"
        input_jitter: float = 0.0
        has_expert_bias: bool = False

    expert_bias_E: torch.Tensor | None

    def __init__(self, config: Config):
        super().__init__(config)
        self.num_experts = config.num_experts
        if config.has_expert_bias and self.expert_bias_E is None:
            del self.expert_bias_E
            self.register_buffer("expert_bias_E", torch.zeros(config.num_experts))
        self.balance = BalanceLoss(
            num_experts=config.num_experts,
            aux_loss_coeff=config.aux_loss_coeff,
            z_loss_coeff=config.z_loss_coeff,
            aux_loss_scope=config.aux_loss_scope,
        )
        self.meter = LoadMeter(config.num_experts)
        self.step_context = StepContext()
        self.input_jitter = config.input_jitter
        self.layer = 0

    def set_place(self, layer: int) -> None:
        """Say which layer of the model this is: draws depend on it, errors and telemetry name it.

        The one place where either is set; the model calls it once it is built.
        """
        self.layer = layer
        if isinstance(self.routed_experts, RelayRoutedExperts):
            self.routed_experts.name_layer(str(layer))

    def forward(
        self,
        x_BLD: torch.Tensor,
        valid_BL: torch.Tensor | None = None,
        token_keys_BL: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply the layer to this rank's tokens; returns `(B, L, D)`.

        Args:
            valid_BL: the tokens that are not padding (None: all). Padding is computed like any
                other token but takes no part in losses and counts.
            token_keys_BL: int64 key of each token, from which noise is made and a router that
                samples draws; without keys there is neither.
        """
        draws = None
        if token_keys_BL is not None:
            token_keys_BL = _rows_like(token_keys_BL, x_BLD)
            draws = self.router.draw(token_keys_BL, self.layer)
            if self.input_jitter:
                x_BLD = jitter(x_BLD, token_keys_BL, self.layer, self.input_jitter)
        routing = self.router(x_BLD, self.expert_bias_E, draws)
        scores_BLK = routing.scores_BLK
        if self.training and torch.is_grad_enabled():
            scores_BLK = self._attach_balance(routing, valid_BL)
        num_tokens_per_expert_E = (
            torch.zeros_like(routing.probs_BLE, dtype=torch.bool)
            .scatter_(-1, routing.expert_ids_BLK, True)
            .sum(dim=(0, 1))
        )
        out_BLD = self.routed_experts(
            x_BLD, scores_BLK, routing.expert_ids_BLK, num_tokens_per_expert_E
        )
        if self.shared_experts is not None:
            out_BLD = out_BLD + self.shared_experts(x_BLD)
        return out_BLD

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        super()._init_self_buffers(buffer_device=buffer_device)
        if self.expert_bias_E is not None:
            self.expert_bias_E = torch.zeros_like(self.tokens_per_expert_E)

    def _attach_balance(self, routing: Routing, valid_BL: torch.Tensor | None) -> torch.Tensor:
        """Attach the balancing losses on local tensors; under TP each rank has part of a row."""
        scores = routing.scores_BLK
        if not isinstance(scores, DTensor):
            return self._attach_local(routing, valid_BL)
        local = Routing(*map(local_part, vars(routing).values()))
        if valid_BL is not None:
            valid_BL = _rows_like(valid_BL, scores)
        attached = self._attach_local(local, valid_BL)
        return DTensor.from_local(attached, scores.device_mesh, scores.placements, run_check=False)

    def _attach_local(self, routing: Routing, valid_BL: torch.Tensor | None) -> torch.Tensor:
        if valid_BL is None:
            valid_BL = torch.ones_like(routing.expert_ids_BLK[..., 0], dtype=torch.bool)
        return self.balance.attach(routing, valid_BL, self.step_context, self.meter)


def _rows_like(rows_BL: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """This rank's part of something about tokens, cut like `x` `(B, L, ...)` under TP."""
    if not isinstance(x, DTensor) or x.to_local().shape[1] == rows_BL.shape[1]:
        return rows_BL
    return rows_BL.chunk(x.device_mesh.size(), dim=1)[x.device_mesh.get_local_rank()]
