"""SparseMixer routing, as Phi-3.5-MoE was trained with it (arXiv:2409.12136, section 2.2).

Two experts are picked one after the other. Only experts whose logit is close to the highest left,
|best - s| <= 2 * jitter * max(|s|, best), compete; the pick's weight is its softmax among them, so
the two weights do not sum to one. In evaluation the highest wins. In training the pick is sampled
among those that compete (Gumbel-max), and its weight is multiplied by a third unless it is the
highest anyway or a uniform draw exceeds 3/4: Heun's third-order estimate of the gradient of
sampling. That factor changes the value only; the gradient is that of the softmax.

Shape suffixes: B batch, L tokens, D model dim, E experts, K = 2 picks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from titan_relay.recompute.decisions import keep_decision
from titan_relay.titan.model.random_numbers import counter_uniform
from titan_relay.titan.model.router import Router, Routing
from titan_relay.titan.private_torchtitan import routes_evenly

_NUM_PICKS = 2
# The released model was trained with the decimals that stand in its code, not with 1/3.
_THIRD = 0.3333
_KEEP_ABOVE = 0.75


@dataclass(frozen=True)
class Draws:
    """Random numbers of one layer: Gumbel noise `(B, L, K, E)`, uniforms `(B, L, K)`; float32."""

    gumbel_BLKE: torch.Tensor
    uniform_BLK: torch.Tensor


class SparseMixerRouter(Router):
    """Samples two experts per token where it is given draws, else takes the best two."""

    @dataclass(kw_only=True, slots=True)
    class Config(Router.Config):
        jitter: float

    def __init__(self, config: Config):
        super().__init__(config)
        assert config.top_k == _NUM_PICKS
        self.jitter = config.jitter

    def draw(self, token_keys_BL: torch.Tensor, layer: int) -> Draws:
        """The draws of some tokens in one layer, from the tokens' keys alone."""
        num_draws = _NUM_PICKS * (self.num_experts + 1)
        counter = torch.arange(num_draws, device=token_keys_BL.device) + layer * num_draws
        uniform = counter_uniform(counter, token_keys_BL.unsqueeze(-1))
        noise, keep = uniform.split([_NUM_PICKS * self.num_experts, _NUM_PICKS], dim=-1)
        gumbel = -torch.log(-torch.log(noise))
        return Draws(gumbel.unflatten(-1, (_NUM_PICKS, -1)).float(), keep.float())

    def forward(
        self,
        x_BLD: torch.Tensor,
        expert_bias_E: torch.Tensor | None = None,
        draws: Draws | None = None,
    ) -> Routing:
        """Route `x_BLD`. Under tensor parallelism draws are those of this rank's tokens."""
        assert expert_bias_E is None, "sparsemixer has no balancing bias"
        if routes_evenly(self):
            return super().forward(x_BLD)
        logits_BLE = self.gate(x_BLD)
        if not isinstance(logits_BLE, DTensor):
            return self.route_logits(logits_BLE, draws)
        mesh, placements = logits_BLE.device_mesh, logits_BLE.placements
        local = self.route_logits(logits_BLE.to_local(), draws)
        return Routing(
            *(
                DTensor.from_local(t, mesh, placements, run_check=False)
                for t in vars(local).values()
            )
        )

    def route_logits(self, logits_BLE: torch.Tensor, draws: Draws | None) -> Routing:
        """Route tokens with these logits `(B, L, E)`, at random where there are draws."""
        first, second = (None, None) if draws is None else _per_pick(draws)
        none_taken = torch.zeros_like(logits_BLE, dtype=torch.bool)
        first_BL1, first_score_BL1 = self._pick(logits_BLE, none_taken, first)
        taken = none_taken.scatter(-1, first_BL1, True)
        second_BL1, second_score_BL1 = self._pick(logits_BLE, taken, second)
        # Only infinite logits can bring the same expert twice. Ids must be distinct all the same;
        # the step is stopped later.
        again = second_BL1 == first_BL1
        second_BL1 = torch.where(again, (first_BL1 + 1) % self.num_experts, second_BL1)
        scores_BLK = torch.cat([first_score_BL1, second_score_BL1], dim=-1)
        return Routing(
            scores_BLK * self.route_scale,
            torch.cat([first_BL1, second_BL1], dim=-1),
            F.softmax(logits_BLE, dim=-1),
            logits_BLE,
        )

    def _pick(
        self,
        logits_BLE: torch.Tensor,
        taken_BLE: torch.Tensor,
        draws: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert per token and its weight, each `(B, L, 1)`."""
        with torch.no_grad():
            left_BLE = logits_BLE.masked_fill(taken_BLE, float("-inf"))
            best_BL1 = left_BLE.amax(dim=-1, keepdim=True)
            distance_BLE = (best_BL1 - logits_BLE) / torch.maximum(logits_BLE.abs(), best_BL1)
            out_BLE = taken_BLE | (distance_BLE > 2 * self.jitter)
        competing_BLE = logits_BLE.masked_fill(out_BLE, float("-inf"))
        probs_BLE = F.softmax(competing_BLE, dim=-1)
        # A recompute must not choose again: see `keep_decision`.
        best_id_BL1 = keep_decision(torch.topk(left_BLE, 1, dim=-1).indices, self.num_experts)
        if draws is None:
            return best_id_BL1, probs_BLE.gather(-1, best_id_BL1)
        gumbel_BLE, uniform_BL1 = draws
        id_BL1 = torch.topk(competing_BLE.detach() + gumbel_BLE, 1, dim=-1).indices
        id_BL1 = keep_decision(id_BL1, self.num_experts)
        score_BL1 = probs_BLE.gather(-1, id_BL1)
        whole = (id_BL1 == best_id_BL1) | (uniform_BL1 > _KEEP_ABOVE)
        value_BL1 = torch.where(whole, score_BL1, score_BL1 * _THIRD).detach()
        return id_BL1, value_BL1 + (score_BL1 - score_BL1.detach())


def _per_pick(draws: Draws) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (draws.gumbel_BLKE[..., pick, :], draws.uniform_BLK[..., pick : pick + 1])
        for pick in range(_NUM_PICKS)
    ]
