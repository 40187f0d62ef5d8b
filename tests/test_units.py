"""Bytes and durations in words."""

import pytest

from titan_relay.units import GIB, MIB, duration_in_words, in_gib, in_mib, in_words


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (in_words(1000), "0.00 MiB"),
        (in_words(GIB - MIB), "1023.00 MiB"),
        (in_words(1.5 * GIB), "1.50 GiB"),
        (in_mib(2 * GIB), "2048.00 MiB"),
        (in_mib(MIB / 4, 1), "0.2 MiB"),
        (in_gib(GIB / 4), "0.25 GiB"),
    ],
)
def test_bytes(text: str, wanted: str) -> None:
    assert text == wanted


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (249, "4m 09s"),
        (3900, "1h 05m"),
        (86400 * 2 + 3 * 3600, "2d 03h"),
    ],
)
def test_durations_show_two_units(seconds: float, text: str) -> None:
    assert duration_in_words(seconds) == text
