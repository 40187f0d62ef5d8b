"""Rotary tables are there once, whatever the number of layers, and are those of the formulas."""

import math
from typing import Any

import pytest
from torch import nn

from tests.titan.tiny import TINY, tiny_model
from titan_relay.titan.model.families.decoder import share_rotary_tables
from titan_relay.titan.model.families.phimoe import LongRoPE
from titan_relay.titan.model.low_memory import CosSinRoPE


def test_all_layers_hold_the_same_rotary_table() -> None:
    model: Any = tiny_model(TINY)
    tables = [block.attention.rope.cache for block in model.layers.values()]
    assert len(tables) > 1
    assert len({table.untyped_storage()._cdata for table in tables}) == 1
    assert tables[0].shape[0] == TINY.max_seq_len


def test_tables_of_other_contents_stay_apart() -> None:
    thetas = (1e4, 1e6, 1e4)
    configs = [CosSinRoPE.Config(dim=8, max_seq_len=16, theta=theta) for theta in thetas]
    ropes: Any = nn.ModuleList(config.build() for config in configs)
    expected = [rope.cache.clone() for rope in ropes]
    share_rotary_tables(ropes)
    assert ropes[0].cache is ropes[2].cache
    assert all(rope.cache.equal(table) for rope, table in zip(ropes, expected, strict=True))
    assert not expected[0].equal(expected[1])


@pytest.mark.parametrize("max_seq_len", [31, 32, 33])
def test_long_factors_are_those_beyond_the_original_length(max_seq_len: int) -> None:
    """As transformers has it: strictly beyond."""
    rope: Any = LongRoPE.Config(
        dim=4,
        max_seq_len=max_seq_len,
        theta=100.0,
        original_max_seq_len=32,
        short_factor=(1.0, 2.0),
        long_factor=(3.0, 5.0),
        short_mscale=1.2,
        long_mscale=1.5,
    ).build()
    factors, scale = ((3.0, 5.0), 1.5) if max_seq_len > 32 else ((1.0, 2.0), 1.2)
    angles = [7 / (factor * 100.0 ** (i / 2)) for i, factor in enumerate(factors)] * 2
    values = [turn(angle) * scale for turn in (math.cos, math.sin) for angle in angles]
    assert rope.cache.shape == (max_seq_len, 8)
    assert rope.cache[7].tolist() == pytest.approx(values, abs=1e-6)
