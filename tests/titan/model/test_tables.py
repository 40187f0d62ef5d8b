"""Rotary tables are there once, whatever the number of layers."""

from typing import Any

from tests.titan.tiny import TINY, tiny_model


def test_all_layers_hold_the_same_rotary_table() -> None:
    model: Any = tiny_model(TINY)
    tables = [block.attention.rope.cache for block in model.layers.values()]
    assert len(tables) > 1
    assert len({table.untyped_storage()._cdata for table in tables}) == 1
    assert tables[0].shape[0] == TINY.max_seq_len
