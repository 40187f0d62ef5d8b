"""What a search found for one variant."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titan_relay.titan.plan.longest import Tried
from titan_relay.units import in_words

_LARGEST = 3


@dataclass(frozen=True)
class Result:
    """max_seq_len: 0 if not even the shortest fits; limited_by: what the peak is made of.

    bytes_per_token: growth between the shortest and the longest sequence tried; 0 if only one was.
    """

    variant: str
    max_seq_len: int
    peak_bytes: int
    limited_by: str
    bytes_per_token: float = 0.0

    def json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["bytes_per_token"]
        return values


def result_of(variant: str, found: Tried | None, tries: Sequence[Tried]) -> Result:
    if found is None:
        return Result(variant, 0, 0, "does not fit at any length")
    slope = 0.0
    if len(tries) > 1:
        low, high = min(tries, key=_length), max(tries, key=_length)
        slope = (high.peak_bytes - low.peak_bytes) / (high.seq_len - low.seq_len)
    return Result(variant, found.seq_len, found.peak_bytes, found.made_of, slope)


def _length(tried: Tried) -> int:
    return tried.seq_len


def made_of(place: str, by_category: dict[str, int], host_bytes: int) -> str:
    """Where the peak is and its largest owners, in words; and the host memory, if any."""
    largest = sorted(by_category.items(), key=lambda item: -item[1])[:_LARGEST]
    parts = ", ".join(f"{name} {in_words(size)}" for name, size in largest)
    host = f"; host memory {in_words(host_bytes)} a rank" if host_bytes else ""
    return f"{place}: {parts}{host}"
