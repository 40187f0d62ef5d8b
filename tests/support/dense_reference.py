"""The truth for Mixture-of-Experts layers: slow, dense, float64, one process.

It shares no code with what it judges: every expert is applied to every token, and a mask of summed
scores picks what counts. Gradients come from autograd on these few lines.

Shape legend: T tokens, K top-k, D model dimension, F expert hidden dimension, E experts.
"""

from dataclasses import dataclass, field

import torch


@dataclass
class DenseLayer:
    """All experts of a layer, float64 leaves, and the activation's numbers."""

    w1_EFD: torch.Tensor
    w2_EDF: torch.Tensor
    w3_EFD: torch.Tensor
    b1_EF: torch.Tensor | None = None
    b2_ED: torch.Tensor | None = None
    b3_EF: torch.Tensor | None = None
    alpha: float = 1.0
    limit: float = float("inf")
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        for name in ("w1_EFD", "w2_EDF", "w3_EFD", "b1_EF", "b2_ED", "b3_EF"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value.detach().double().clone().requires_grad_())

    def __call__(
        self, x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor
    ) -> torch.Tensor:
        num_experts = self.w1_EFD.shape[0]
        out_TD = torch.zeros_like(x_TD)
        for expert in range(num_experts):
            gate = torch.einsum("td,fd->tf", x_TD, self.w1_EFD[expert])
            up = torch.einsum("td,fd->tf", x_TD, self.w3_EFD[expert])
            if self.b1_EF is not None and self.b3_EF is not None:
                gate, up = gate + self.b1_EF[expert], up + self.b3_EF[expert]
            gate = torch.clamp(gate, max=self.limit)
            up = torch.clamp(up, min=-self.limit, max=self.limit) + self.up_offset
            hidden = gate / (1 + torch.exp(-self.alpha * gate)) * up
            y_TD = torch.einsum("tf,df->td", hidden, self.w2_EDF[expert])
            if self.b2_ED is not None:
                y_TD = y_TD + self.b2_ED[expert]
            weight_T = torch.where(ids_TK == expert, scores_TK, 0.0).sum(1)
            out_TD = out_TD + weight_T[:, None] * y_TD
        return out_TD


@dataclass
class RankData:
    """One rank's inputs and the gradient of its output, in the dtype under test."""

    x_TD: torch.Tensor
    scores_TK: torch.Tensor
    ids_TK: torch.Tensor
    dout_TD: torch.Tensor


@dataclass
class Expected:
    """What every rank must get, float64: by rank for tokens, by expert for weights."""

    out: list[torch.Tensor] = field(default_factory=list)
    dx: list[torch.Tensor] = field(default_factory=list)
    dscores: list[torch.Tensor] = field(default_factory=list)
    dweights: list[torch.Tensor] = field(default_factory=list)  # w1, w2, w3, then biases


def expected_results(layer: DenseLayer, ranks: list[RankData]) -> Expected:
    """Every rank's tokens through the same dense layer; weight gradients summed over ranks."""
    expected = Expected()
    for data in ranks:
        x_TD = data.x_TD.detach().double().requires_grad_()
        scores_TK = data.scores_TK.detach().double().requires_grad_()
        out_TD = layer(x_TD, scores_TK, data.ids_TK)
        out_TD.backward(data.dout_TD.double())
        expected.out.append(out_TD.detach())
        expected.dx.append(_grad(x_TD))
        expected.dscores.append(_grad(scores_TK))
    leaves = (layer.w1_EFD, layer.w2_EDF, layer.w3_EFD, layer.b1_EF, layer.b2_ED, layer.b3_EF)
    expected.dweights = [_grad(leaf) for leaf in leaves if leaf is not None]
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


def _grad(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
