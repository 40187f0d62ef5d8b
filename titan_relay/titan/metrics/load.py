"""How evenly a router loads its experts: pure functions of the tokens per expert.

Shape suffixes: L MoE layers, E experts per layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_WORST = {"max_share": max, "entropy": min, "dead_experts": max}


def load_stats(tokens_LE: torch.Tensor) -> dict[str, torch.Tensor]:
    """Load of each layer, float64 `(L,)` each, from tokens per expert `(L, E)` of any real dtype.

    max_share: the hottest expert's part of the layer's routed rows, 1/E (even) to 1.
    entropy: entropy of the shares over log E, 0 (one expert has all) to 1 (even).
    dead_experts: experts that got no row.
    A layer without any row has share 0, entropy 0 and E dead experts; with E = 1 entropy is 1.

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
    return {
        "max_share": share_LE.amax(dim=1),
        "entropy": entropy_L,
        "dead_experts": (tokens_LE == 0).sum(dim=1).double(),
    }


def load_curves(tokens_LE: torch.Tensor, layer_ids: Sequence[int]) -> dict[str, float]:
    """Curves per layer and the worst of all layers; `layer_ids` are the rows' layer numbers."""
    curves: dict[str, float] = {}
    for name, stats_L in load_stats(tokens_LE).items():
        values = stats_L.tolist()
        for layer, value in zip(layer_ids, values, strict=True):
            curves[f"moe/load/layer_{layer:02d}/{name}"] = value
        if values:
            curves[f"moe/load/worst/{name}"] = _WORST[name](values)
    return curves
