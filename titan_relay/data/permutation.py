"""A seeded shuffle of 0..n-1 that needs no memory: any position is computed on its own.

A stored permutation of a billion documents takes 8 GB on every rank and must be drawn again
each epoch. A Feistel network over the next power of four is a bijection whatever its round
function; stepping until the value is below `n` ("cycle walking") restricts it to 0..n-1. It
depends on no library's random generator, so a resumed run sees the same order after upgrades.
"""

import hashlib

_NUM_ROUNDS = 6
_MASK64 = (1 << 64) - 1


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
