"""The memory-less shuffle is a bijection, depends on its key, and mixes."""

import numpy as np
import pytest

from titan_relay.data.order import SeededPermutation


@pytest.mark.parametrize("num_items", [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000])
def test_every_item_occurs_once(num_items: int) -> None:
    order = SeededPermutation(num_items, "seed")
    assert sorted(order[i] for i in range(num_items)) == list(range(num_items))


def test_order_depends_on_the_key_only() -> None:
    def first(key: str) -> list[int]:
        return [SeededPermutation(500, key)[i] for i in range(500)]

    assert first("1/data/0") == first("1/data/0")
    assert first("1/data/0") != first("1/data/1")


def test_order_is_the_one_of_released_versions() -> None:
    """A checkpoint's position is only right while this order never changes."""
    order = SeededPermutation(10, "1/data/0")
    assert [order[i] for i in range(10)] == [9, 2, 7, 1, 5, 6, 0, 8, 3, 4]


def test_positions_and_items_are_uncorrelated() -> None:
    """1000 items: a random order's rank correlation has standard deviation 0.032."""
    for key in ("a", "b", "c"):
        order = SeededPermutation(1000, key)
        items = np.array([order[i] for i in range(1000)])
        assert abs(np.corrcoef(np.arange(1000), items)[0, 1]) < 0.16  # five deviations
        neighbours = np.abs(np.diff(items)).mean()
        assert 280 < neighbours < 390  # a third of the range


def test_a_billion_items_need_no_table() -> None:
    order = SeededPermutation(10**9, "big")
    items = {order[i] for i in range(1000)}
    assert len(items) == 1000
    assert max(items) > 9 * 10**8
