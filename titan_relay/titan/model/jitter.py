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

from titan_relay.ops.row_chunks import fake_chunk, row_chunks
from titan_relay.titan.model.random_numbers import random_bits

_ELEMENT_BYTES = 3 * 8  # a hash of 64 bits and what it is made from


def jitter(
    x_BLD: torch.Tensor, token_keys_BL: torch.Tensor, layer: int, amount: float
) -> torch.Tensor:
    """`x_BLD` times the noise; under tensor parallelism keys are those of this rank's tokens.

    Saved for backward: the keys.
    """
    if isinstance(x_BLD, DTensor):
        local = jitter(x_BLD.to_local(), token_keys_BL, layer, amount)
        return DTensor.from_local(local, x_BLD.device_mesh, x_BLD.placements, run_check=False)
    noisy: torch.Tensor = _jitter(x_BLD, token_keys_BL, layer, amount)
    return noisy


def factors(
    token_keys_N: torch.Tensor, dim: int, layer: int, amount: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's and the router's factors of some tokens, each float32 `(N, D)`."""
    # Negative counters: a router's draws count upwards from 0 under the same key.
    counter = -1 - layer * dim - torch.arange(dim, device=token_keys_N.device)
    bits_ND = random_bits(counter, token_keys_N.unsqueeze(-1))
    first_ND = _factor((bits_ND >> 32) & 0xFFFFFFFF, amount)
    return first_ND, _factor(bits_ND & 0xFFFFFFFF, amount)


def _noise(keys_N: torch.Tensor, dim: int, layer: int, amount: float) -> torch.Tensor:
    first_ND, second_ND = factors(keys_N, dim, layer, amount)
    return first_ND.mul_(second_ND)


def _factor(half_ND: torch.Tensor, amount: float) -> torch.Tensor:
    """32 random bits as a uniform from [1 - amount, 1 + amount]."""
    return half_ND.float().mul_(2.0**-31).sub_(1).mul_(amount).add_(1)


# An operator, so that a plan on fake tensors takes one step for it and not thousands.
@torch.library.custom_op("titan_relay::jitter", mutates_args=())
def _jitter(
    x_BLD: torch.Tensor, token_keys_BL: torch.Tensor, layer: int, amount: float
) -> torch.Tensor:
    dim = x_BLD.shape[-1]
    out_BLD = torch.empty_like(x_BLD, memory_format=torch.contiguous_format)
    x_ND, out_ND, keys_N = x_BLD.reshape(-1, dim), out_BLD.view(-1, dim), token_keys_BL.flatten()
    for rows in row_chunks(len(x_ND), _ELEMENT_BYTES * dim, x_BLD.device):
        noise_ND = _noise(keys_N[rows], dim, layer, amount)
        out_ND[rows] = x_ND[rows] * noise_ND.to(x_BLD.dtype)
        del noise_ND  # not beside the next chunk's
    return out_BLD


@_jitter.register_fake
def _(x_BLD: torch.Tensor, token_keys_BL: torch.Tensor, layer: int, amount: float) -> torch.Tensor:
    out_BLD = torch.empty_like(x_BLD, memory_format=torch.contiguous_format)
    fake_chunk(x_BLD, _ELEMENT_BYTES * x_BLD.shape[-1])
    return out_BLD


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, token_keys_BL, ctx.layer, ctx.amount = inputs
    ctx.save_for_backward(token_keys_BL)


def _backward(ctx: Any, dy_BLD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (token_keys_BL,) = ctx.saved_tensors
    return _jitter(dy_BLD, token_keys_BL, ctx.layer, ctx.amount), None, None, None


_jitter.register_autograd(_backward, setup_context=_setup_context)
