"""The truth for Mixture-of-Experts layers: slow, dense, float64, one process.

It shares no code with what it judges: every expert is applied to every token, and a mask of summed
scores picks what counts. Gradients come from autograd on these few lines. One expert's activations
are in memory at a time, so that layers of a published size can be judged on a device.

Shape legend: T tokens, K top-k, D model dimension, F expert hidden dimension, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class DenseLayer:
    """All experts of a layer, and the activation's numbers."""

    weights: Tensors  # w1_EFD, w2_EDF, w3_EFD; with biases then b1_EF, b2_ED, b3_EF
    alpha: float = 1.0
    limit: float = float("inf")
    up_offset: float = 0.0

    def expert(self, x_TD: torch.Tensor, weights: Tensors) -> torch.Tensor:
        """One expert on every token; ``weights`` are its own."""
        w1_FD, w2_DF, w3_FD, *biases = weights
        gate_TF = torch.einsum("td,fd->tf", x_TD, w1_FD)
        up_TF = torch.einsum("td,fd->tf", x_TD, w3_FD)
        if biases:
            gate_TF, up_TF = gate_TF + biases[0], up_TF + biases[2]
        gate_TF = torch.clamp(gate_TF, max=self.limit)
        up_TF = torch.clamp(up_TF, min=-self.limit, max=self.limit) + self.up_offset
        hidden_TF = gate_TF / (1 + torch.exp(-self.alpha * gate_TF)) * up_TF
        y_TD = torch.einsum("tf,df->td", hidden_TF, w2_DF)
        return y_TD + biases[1] if biases else y_TD


@dataclass
class RankData:
    """One rank's inputs and the gradient of its output, in the dtype under test."""

    x_TD: torch.Tensor
    scores_TK: torch.Tensor
    ids_TK: torch.Tensor
    dout_TD: torch.Tensor


@dataclass(frozen=True)
class Expected:
    """What ranks must get, float64: by rank for tokens, by expert for weights."""

    out: Tensors
    dx: Tensors
    dscores: Tensors
    dweights: Tensors  # as of the layer's weights

    def of_rank(self, rank: int, num_ranks: int) -> Tensors:
        """``out``, ``dx``, ``dscores`` and its own experts' ``dweights``."""
        dweights = share_of(self.dweights, rank, num_ranks)
        return [self.out[rank], self.dx[rank], self.dscores[rank], *dweights]


def share_of(tensors: Sequence[torch.Tensor], rank: int, num_ranks: int) -> Tensors:
    """Of tensors by expert those of a rank: consecutive ones."""
    return [tensor.chunk(num_ranks)[rank] for tensor in tensors]


def expected_results(layer: DenseLayer, ranks: Sequence[RankData]) -> Expected:
    """Every rank's tokens through the same dense layer; weight gradients summed over ranks."""
    dweights = [torch.zeros_like(weight, dtype=torch.float64) for weight in layer.weights]
    expected = Expected([], [], [], dweights)
    for data in ranks:
        x_TD, scores_TK = _leaf(data.x_TD), _leaf(data.scores_TK)
        out_TD = torch.zeros_like(x_TD)
        for expert, totals in enumerate(zip(*dweights, strict=True)):
            weights = [_leaf(weight[expert]) for weight in layer.weights]
            score_T = torch.where(data.ids_TK == expert, scores_TK, 0.0).sum(1)
            part_TD = score_T[:, None] * layer.expert(x_TD, weights)
            part_TD.backward(data.dout_TD.double())
            out_TD += part_TD.detach()
            for total, weight in zip(totals, weights, strict=True):
                total += _grad(weight)
        expected.out.append(out_TD.detach())
        expected.dx.append(_grad(x_TD))
        expected.dscores.append(_grad(scores_TK))
    return expected


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest expected value; the difference where that is 0."""
    assert actual.shape == expected.shape, f"{actual.shape} != {expected.shape}"
    if expected.numel() == 0:
        return 0.0
    largest = expected.abs().max().item()
    difference = (actual.double() - expected).abs().max().item()
    if difference != difference:
        return float("inf")
    return difference / largest if largest > 0 else difference


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().clone().requires_grad_()


def _grad(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad
