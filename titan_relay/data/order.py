"""Which document comes next: a seeded shuffle of one source, and the choice among several.

A stored permutation of a billion documents takes 8 GB on every rank and must be drawn again
each epoch. A Feistel network over the next power of four is a bijection whatever its round
function; stepping until the value is below `n` ("cycle walking") restricts it to 0..n-1, so that
any position is computed on its own. It depends on no library's random generator, so a resumed run
sees the same order after upgrades.
"""

import hashlib
from collections.abc import Sequence

_NUM_ROUNDS = 6
_MASK64 = (1 << 64) - 1
_GOLDEN = 0.6180339887498949


class SeededPermutation:
    """A bijection of ``range(num_items)`` drawn from `key` (any text)."""

    def __init__(self, num_items: int, key: str) -> None:
        assert num_items > 0
        self._num_items = num_items
        self._half_bits = max(1, (max(num_items - 1, 1).bit_length() + 1) // 2)
        digest = hashlib.sha512(key.encode()).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "big") for i in range(_NUM_ROUNDS)]

    def __getitem__(self, position: int) -> int:
        """The item at `position`; expected time O(1): fewer than four walks on average."""
        assert 0 <= position < self._num_items
        value = self._permute_power(position)
        while value >= self._num_items:
            value = self._permute_power(value)
        return value

    def _permute_power(self, value: int) -> int:
        bits = self._half_bits
        mask = (1 << bits) - 1
        left, right = value >> bits, value & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << bits) | right


def _mix(value: int) -> int:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def choose_source(
    shares: Sequence[float], num_tokens: Sequence[int], open_sources: Sequence[bool], lane: int
) -> int | None:
    """The open source that is furthest behind its share of this lane's tokens.

    A source that ran out leaves its share to the others. Ties go to the earlier source. Before
    a lane has any token, every source is equally far behind; the first choice is then a point of
    a low-discrepancy sequence over the lanes, so that the first step already is a mixture and the
    lanes do not change sources in lockstep. Deterministic: depends on the arguments only.

    Args:
        shares: target share of each source, summing to 1.
        num_tokens: tokens this lane has taken from each source.
        open_sources: whether each source still has documents for this lane.

    Returns: an index into `shares`, or None when no source is open.
    """
    candidates = [index for index, is_open in enumerate(open_sources) if is_open]
    if not candidates:
        return None
    open_share = sum(shares[index] for index in candidates)
    total = sum(num_tokens[index] for index in candidates)
    if sum(num_tokens) == 0:
        point = ((lane + 0.5) * _GOLDEN) % 1.0 * open_share
        for index in candidates:
            point -= shares[index]
            if point < 0:
                return index
        return candidates[-1]
    return max(candidates, key=lambda i: (shares[i] / open_share * (total + 1) - num_tokens[i], -i))
