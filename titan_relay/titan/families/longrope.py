"""LongRoPE (arXiv:2402.13753): rotary embeddings with one factor per wavelength, and one list of
factors for short sequences and one for long ones.

Which list applies follows from the length that the model is run for: torchtitan sets `max_seq_len`
to `training.seq_len`. So all ranks and all steps of a run use the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titan_relay.titan.lean import CosSinRoPE


class LongRoPE(CosSinRoPE):
    """Rotary embeddings whose wavelengths are stretched and whose result is scaled."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        original_max_seq_len: int
        short_factor: tuple[float, ...]
        long_factor: tuple[float, ...]
        short_mscale: float
        long_mscale: float

    def _precompute_cache(self) -> torch.Tensor:
        """Cosines and sines of every position: float32 `(max_seq_len, 2 * dim)`."""
        config = self.config
        assert isinstance(config, LongRoPE.Config)
        long = config.max_seq_len > config.original_max_seq_len
        factor = torch.tensor(config.long_factor if long else config.short_factor)
        mscale = config.long_mscale if long else config.short_mscale
        exponent = torch.arange(0, config.dim, 2).float() / config.dim
        frequency = 1.0 / (factor * config.theta**exponent)
        angle = torch.outer(torch.arange(config.max_seq_len).float(), frequency)
        angle = torch.cat([angle, angle], dim=-1)
        return torch.cat([angle.cos(), angle.sin()], dim=-1) * mscale
