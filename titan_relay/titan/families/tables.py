"""One table of rotary embeddings for all layers instead of one for each.

A table has a row for every position of the whole sequence, on every rank: with head width 128 and
long sequences those of 48 layers are as large as 48 copies of a quarter of a rank's tokens or more.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import nn
from torchtitan.models.common.rope import RoPE


def share_rotary_tables(model: nn.Module) -> None:
    """Let layers whose tables have the same contents hold the same table."""
    tables: dict[tuple[object, ...], torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, RoPE):
            config = module.config
            values = (repr(getattr(config, field.name)) for field in fields(config))
            key = (type(module), *values)
            module.cache = tables.setdefault(key, module.cache)
