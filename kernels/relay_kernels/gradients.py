"""Which gradients a backward gives, and where they go.

Shape legend: T tokens, K top-k, D model dimension.
"""

from dataclasses import dataclass

import torch

from relay_kernels.weights import ExpertWeights


@dataclass(frozen=True)
class Gradients:
    """Where gradients go; None means that nobody asks for that one, and its work is left out.

    ``dx_TD`` is summed into and ``dscores_TK`` (contiguous) is written. ``weights`` is summed into
    if ``accumulate_weights``, and otherwise overwritten (with zeros for an expert without rows).
    """

    dx_TD: torch.Tensor | None
    dscores_TK: torch.Tensor | None
    weights: ExpertWeights | None
    accumulate_weights: bool = False
