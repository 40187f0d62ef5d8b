"""The search for the longest sequence, over made-up memory."""

from collections.abc import Callable

import pytest

from titan_relay.titan.plan.longest import Tried, longest

LIMIT = 1_000_000


@pytest.mark.parametrize(
    ("bytes_of", "answer"),
    [
        (lambda length: 1000 + 7 * length, 142_336),  # (1e6 - 1000) / 7 = 142,714
        (lambda length: 20 * length, 49_664),
        # A jump, as where another ring is chosen, between 64 units and what would fit before it.
        (lambda length: 3 * length + (900_000 if length > 64 * 512 else 0), 33_280),
        (lambda length: length * length // 4096, 64_000),
    ],
)
@pytest.mark.parametrize("first", [1, 4096, 10**6])
def test_the_longest_that_fits(bytes_of: Callable[[int], int], answer: int, first: int) -> None:
    tries: list[int] = []

    def peak(length: int) -> Tried:
        tries.append(length)
        return Tried(length, bytes_of(length), "")

    found = longest(peak, 512, LIMIT, first)
    assert found is not None
    assert found.peak_bytes <= LIMIT
    # Within one unit or 1%.
    assert answer - max(512, answer / 100) <= found.seq_len <= answer
    assert len(tries) == len(set(tries)) <= 20


def test_nothing_fits() -> None:
    assert longest(lambda length: Tried(length, LIMIT + length, ""), 512, LIMIT, 4096) is None
