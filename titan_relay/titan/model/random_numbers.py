"""Random numbers as a function of a key and a counter: the same for any number of ranks, any
layout, any device and any order of calls, with no state to save.

The generator is SplitMix64 used as a hash of the counter (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014); normals come from the Box-Muller transform.
"""

from __future__ import annotations

import hashlib
import math

import torch


def _signed(value: int) -> int:
    """The two's complement int64 with the bits of a 64-bit unsigned value."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def key_of(text: str) -> int:
    """A 64-bit key (as int64) for whatever `text` names."""
    return _signed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch shifts in the sign bit)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def random_bits(counter: torch.Tensor, key: int | torch.Tensor) -> torch.Tensor:
    """64 random bits (int64) per int64 counter; `key` may be one per element."""
    x = counter * _GAMMA + key
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def counter_uniform(counter: torch.Tensor, key: int | torch.Tensor) -> torch.Tensor:
    """One float64 uniform in (0, 1), ends excluded, per int64 counter."""
    return (_shift_right(random_bits(counter, key), 11).double() + 0.5) * 2.0**-53


def counter_normal(counter: torch.Tensor, key: int, std: float) -> torch.Tensor:
    """One float32 normal per int64 counter, independent of every other element's presence."""
    bits = random_bits(counter, key)
    # The two halves of the hash give the two uniforms of Box-Muller; u1 is never 0.
    u1 = (_shift_right(bits, 32).double() + 1.0) * 2.0**-32
    u2 = (bits & 0xFFFFFFFF).double() * 2.0**-32
    return (torch.sqrt(-2.0 * torch.log(u1)) * torch.cos(2.0 * math.pi * u2) * std).float()
