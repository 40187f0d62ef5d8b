"""How evenly a router loads its experts: pure functions of the tokens per expert.

Shape suffixes: L MoE layers, E experts per layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoadStats:
    """Load of each layer.

    max_share_L: the hottest expert's part of the layer's routed rows, 1/E (even) to 1.
    entropy_L: entropy of the shares over log E, 0 (one expert has all) to 1 (even).
    dead_experts_L: experts that got no row.
    A layer without any row has share 0, entropy 0 and E dead experts; with E = 1 entropy is 1.
    """

    max_share_L: torch.Tensor
    entropy_L: torch.Tensor
    dead_experts_L: torch.Tensor


def load_stats(tokens_LE: torch.Tensor) -> LoadStats:
    """Load statistics from tokens per expert `(L, E)`, any real dtype, on any device.

    The tokens must be the sums over all ranks and microbatches of a step: the entropy of a sum is
    not the sum of entropies.
    """
    num_experts = tokens_LE.shape[1]
    tokens_LE = tokens_LE.double()
    rows_L1 = tokens_LE.sum(dim=1, keepdim=True)
    share_LE = tokens_LE / rows_L1.clamp(min=1)
    if num_experts > 1:
        entropy_L = torch.special.entr(share_LE).sum(dim=1) / math.log(num_experts)
    else:
        entropy_L = (rows_L1[:, 0] > 0).double()
    return LoadStats(
        max_share_L=share_LE.amax(dim=1),
        entropy_L=entropy_L,
        dead_experts_L=(tokens_LE == 0).sum(dim=1),
    )


def load_curves(tokens_LE: torch.Tensor, layer_ids: Sequence[int]) -> dict[str, float]:
    """Curves per layer and the worst of all layers; `layer_ids` are the rows' layer numbers."""
    stats = load_stats(tokens_LE)
    columns = {
        "max_share": (stats.max_share_L, max),
        "entropy": (stats.entropy_L, min),
        "dead_experts": (stats.dead_experts_L.double(), max),
    }
    curves: dict[str, float] = {}
    for name, (values_L, worst) in columns.items():
        for layer, value in zip(layer_ids, values_L.tolist(), strict=True):
            curves[f"moe/load/layer_{layer:02d}/{name}"] = value
        if layer_ids:
            curves[f"moe/load/worst/{name}"] = worst(values_L.tolist())
    return curves
