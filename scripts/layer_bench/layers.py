"""The implementations by name, each a ``Layer`` on one rank of the expert-parallel group.

Torchtitan and Megatron-Core are imported only when one of theirs is asked for.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from layer_bench.layer import Layer, grads_of
from layer_bench.setting import Setting
from titan_relay.moe import ExpertWeights, RelayOptions, relay_moe, relay_ring

IMPLEMENTATIONS = (
    "relay-experts",
    "relay-tokens",
    "relay-auto",
    "relay-weighed",  # auto, but experts where the routing is uneven
    "torchtitan",
    "torchtitan-recompute",
    "torchtitan-stock",
    "megatron",
    "megatron-recompute",
    "megatron-grouped",
)
_MAX_IMBALANCE = 1.25


def build_layer(
    name: str, setting: Setting, group: dist.ProcessGroup, options: RelayOptions
) -> Layer:
    """Build implementation ``name`` on this rank; ``options`` are of the relay's."""
    if name.startswith("relay-"):
        return _relay_layer(name, setting, group, options)
    if name.startswith("torchtitan"):
        from layer_bench.torchtitan_layer import torchtitan_layer

        layer = torchtitan_layer(name, setting, group)
    else:
        from layer_bench.megatron_layer import megatron_layer

        layer = megatron_layer(name, setting, group)
    if name.endswith("-recompute"):
        # The whole layer runs again in the backward, communication included. Megatron-Core's own
        # recompute is reentrant; torchtitan's is not.
        reentrant = name.startswith("megatron")
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)
    return layer


def _relay_layer(
    name: str, setting: Setting, group: dist.ProcessGroup, options: RelayOptions
) -> Layer:
    weights = [weight.requires_grad_() for weight in setting.weights(dist.get_rank(group))]
    experts = ExpertWeights(*weights)
    ring_group = group if setting.ep > 1 else None
    if ring_group is not None:
        relay_ring(ring_group)
    weighed = name == "relay-weighed"
    options = replace(
        options,
        circulate="auto" if weighed else name.removeprefix("relay-"),  # type: ignore[arg-type]
        max_imbalance=_MAX_IMBALANCE if weighed else None,
        layer=name,
    )

    def forward(x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        return relay_moe(x_TD, scores_TK, ids_TK, experts, ring_group, options)

    return Layer(name, forward, weights, lambda: grads_of(weights), ring_group)
