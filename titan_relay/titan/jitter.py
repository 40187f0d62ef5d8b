"""Noise on the input of a MoE layer in training, as Phi-3.5-MoE was trained with it (`jitter` of
Switch Transformer, arXiv:2101.03961, table 11).

Every element is multiplied by two uniforms from [1 - amount, 1 + amount], one that transformers
draws in the layer and one that it draws in the router; experts see both. Both come from one hash of
the token's key, layer and place in the vector, so nothing but keys is kept for the backward pass.

Shape suffixes: B batch, L tokens, D model dim, N tokens of all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titan_relay.titan.counter_random import random_bits

_CHUNK_ELEMENTS = 1 << 22  # bounds the temporaries to a few dozen MiB


def jitter(
    x_BLD: torch.Tensor, token_keys_BL: torch.Tensor, layer: int, amount: float
) -> torch.Tensor:
    """`x_BLD` times the noise; under tensor parallelism keys are those of this rank's tokens."""
    if isinstance(x_BLD, DTensor):
        local = jitter(x_BLD.to_local(), token_keys_BL, layer, amount)
        return DTensor.from_local(local, x_BLD.device_mesh, x_BLD.placements, run_check=False)
    noisy: torch.Tensor = _Jitter.apply(x_BLD, token_keys_BL, layer, amount)
    return noisy


def factors(
    token_keys_N: torch.Tensor, dim: int, layer: int, amount: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's and the router's factors of some tokens, each float32 `(N, D)`."""
    # Negative counters: a router's draws count upwards from 0 under the same key.
    counter = -1 - layer * dim - torch.arange(dim, device=token_keys_N.device)
    bits_ND = random_bits(counter, token_keys_N.unsqueeze(-1))
    halves = ((bits_ND >> 32) & 0xFFFFFFFF, bits_ND & 0xFFFFFFFF)
    first, second = (1 + amount * (each.float() * 2.0**-31 - 1) for each in halves)
    return first, second


class _Jitter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BLD: torch.Tensor, token_keys_BL: torch.Tensor, layer: int, amount: float
    ) -> torch.Tensor:
        ctx.save_for_backward(token_keys_BL)
        ctx.layer, ctx.amount = layer, amount
        return _times_noise(x_BLD, token_keys_BL, layer, amount)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (token_keys_BL,) = ctx.saved_tensors
        return _times_noise(grads[0], token_keys_BL, ctx.layer, ctx.amount), None, None, None


def _times_noise(
    x_BLD: torch.Tensor, token_keys_BL: torch.Tensor, layer: int, amount: float
) -> torch.Tensor:
    dim = x_BLD.shape[-1]
    out_BLD = torch.empty_like(x_BLD, memory_format=torch.contiguous_format)
    rows = max(1, _CHUNK_ELEMENTS // dim)
    chunks = zip(
        x_BLD.reshape(-1, dim).split(rows),
        out_BLD.view(-1, dim).split(rows),
        token_keys_BL.flatten().split(rows),
        strict=True,
    )
    for x_ND, out_ND, keys_N in chunks:
        first_ND, second_ND = factors(keys_N, dim, layer, amount)
        out_ND.copy_(x_ND * (first_ND * second_ND).to(x_ND.dtype))
    return out_BLD
