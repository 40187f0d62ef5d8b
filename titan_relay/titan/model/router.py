"""Token-choice top-k router that also returns its logits, which the z-loss needs.

Shape suffixes: B batch, L tokens, D model dim, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from titan_relay.ops import float32_linear
from titan_relay.recompute.decisions import keep_decision
from titan_relay.titan.private_torchtitan import even_routing, routes_evenly, scores_in_groups


class Float32Linear(Linear):
    """A linear layer that computes in float32 whatever the dtype of its input and weight.

    Expert choice is a comparison of close numbers; torchtitan asks autocast for float32 here, which
    does nothing on CPU.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map `(..., in_features)` of any float dtype to float32 `(..., out_features)`."""
        if isinstance(input, DTensor) or isinstance(self.weight, DTensor):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(input.float(), self.weight.float(), bias)
        out = float32_linear(input, self.weight)
        return out if self.bias is None else out + self.bias.float()


@dataclass(frozen=True)
class Routing:
    """What the router decided for a batch; every tensor covers this rank's tokens.

    scores_BLK: weights of the chosen experts, float32. expert_ids_BLK: distinct ids in [0, E),
    int64. probs_BLE: scores of all experts before any bias. logits_BLE: before the score function.
    """

    scores_BLK: torch.Tensor
    expert_ids_BLK: torch.Tensor
    probs_BLE: torch.Tensor
    logits_BLE: torch.Tensor


class Router(TokenChoiceTopKRouter):
    """Routes every token to its K best experts, in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def draw(self, token_keys_BL: torch.Tensor, layer: int) -> Any:
        """Random numbers for `forward`, from the tokens' keys; None for a router without chance."""
        return None

    def forward(
        self,
        x_BLD: torch.Tensor,
        expert_bias_E: torch.Tensor | None = None,
        draws: Any = None,
    ) -> Routing:
        """Route `x_BLD`; the bias takes part in the choice of experts, not in their scores.

        A row with a NaN logit still gets K distinct valid ids (with NaN scores), so that a
        fault in one token cannot become an illegal memory access; `balance` stops the step.
        """
        logits_BLE = self.gate(x_BLD)
        if self.score_func == "softmax":
            probs_BLE = F.softmax(logits_BLE, dim=-1)
        else:
            probs_BLE = torch.sigmoid(logits_BLE)
        choice_BLE = probs_BLE if expert_bias_E is None else probs_BLE + expert_bias_E
        if self.num_expert_groups is not None:
            choice_BLE = scores_in_groups(self, choice_BLE)
        if routes_evenly(self):
            ids_BLK, scores_BLK = even_routing(self, probs_BLE)
        else:
            ids_BLK = torch.topk(choice_BLE, k=self.top_k, dim=-1, sorted=False).indices
            ids_BLK = keep_decision(ids_BLK, self.num_experts)
            scores_BLK = probs_BLE.gather(dim=-1, index=ids_BLK)
        if self.route_norm:
            scores_BLK = scores_BLK / (scores_BLK.sum(dim=-1, keepdim=True) + 1e-20)
        return Routing(scores_BLK * self.route_scale, ids_BLK, probs_BLE, logits_BLE)
