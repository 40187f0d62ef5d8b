"""A layer's forward and backward on one rank and any ring, below the registered op."""

from dataclasses import dataclass

import torch

from relay_kernels import ExpertWeights
from tests.moe.parity import local_weights, relative_errors
from tests.support.moe_cases import PLAIN, MoeCase
from tests.support.virtual_ring import VirtualWorld
from titan_relay.moe import RelayOptions, Ring
from titan_relay.moe.call import RelayCall, Wants, layer_shape
from titan_relay.moe.layer import layer_backward, layer_forward
from titan_relay.moe.routing import routed_tokens, sort_rows
from titan_relay.moe.shapes import token_slices


class RankOfLayer:
    """One rank's inputs and experts; ``tensors`` are all of them."""

    def __init__(self, case: MoeCase, rank: int, options: RelayOptions) -> None:
        self.case, self.options = case, options
        self.data = case.data(rank)
        self.weights = ExpertWeights(*(each.detach() for each in local_weights(case, rank)))
        self.shape = layer_shape(
            self.data.x_TD, self.data.scores_TK, self.weights, case.num_ranks, options
        )
        slices = token_slices(self.shape.num_tokens, case.num_ranks, options)
        self.rows_N, self.counts = sort_rows(self.data.ids_TK, case.num_experts, slices)

    def tensors(self) -> list[torch.Tensor]:
        data = self.data
        return [data.x_TD, data.scores_TK, data.dout_TD, self.rows_N, *self.weights.tensors()]

    def forward(self, ring: Ring | None) -> torch.Tensor:
        call = RelayCall(self.shape, self.options, PLAIN, ring, "forward")
        return layer_forward(call, *self._inputs())

    def backward(self, ring: Ring | None) -> list[torch.Tensor]:
        """Gradients of x, scores and the weights."""
        call = RelayCall(self.shape, self.options, PLAIN, ring, "backward")
        wants = Wants(True, True, True)
        gradients = layer_backward(call, wants, self.data.dout_TD, *self._inputs())
        return [gradients.dx_TD, gradients.dscores_TK, *gradients.weights.tensors()]

    def _inputs(self) -> tuple:
        data, num_experts = self.data, self.case.num_experts
        tokens = routed_tokens(data.x_TD, data.scores_TK, self.rows_N, self.counts, num_experts)
        return tokens, self.counts, self.weights


@dataclass(frozen=True)
class RankResult:
    """``out``, ``dx``, ``dscores`` and the weights' gradients; and the virtual time they took."""

    tensors: list[torch.Tensor]
    forward_s: float
    backward_s: float


def run_virtual(case: MoeCase, options: RelayOptions, world: VirtualWorld) -> list[RankResult]:
    """Every rank's results."""
    layers = [RankOfLayer(case, rank, options) for rank in range(case.num_ranks)]
    for layer in layers:
        world.protect(layer.tensors())

    def on_rank(rank: int, ring: Ring | None) -> RankResult:
        out_TD = layers[rank].forward(ring)
        forward_s = world.clock_s[rank]
        gradients = layers[rank].backward(ring)
        return RankResult([out_TD, *gradients], forward_s, world.clock_s[rank] - forward_s)

    return world.run(on_rank)


def virtual_errors(case: MoeCase, options: RelayOptions, world: VirtualWorld) -> dict[str, float]:
    """The largest relative error over ranks, by result."""
    expected = case.expected()
    errors: dict[str, float] = {}
    for rank, result in enumerate(run_virtual(case, options, world)):
        wanted = expected.of_rank(rank, case.num_ranks)
        for name, error in relative_errors(result.tensors, wanted).items():
            errors[name] = max(errors.get(name, 0.0), error)
    return errors
