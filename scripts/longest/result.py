"""What a search found for one variant."""

from dataclasses import asdict, dataclass
from typing import Any

from titan_relay.titan.plan.longest import Tried

_LARGEST = 3


@dataclass(frozen=True)
class Result:
    """max_seq_len: 0 if not even the shortest fits; limited_by: what the peak is made of."""

    variant: str
    max_seq_len: int
    peak_bytes: int
    limited_by: str

    def json(self) -> dict[str, Any]:
        return asdict(self)


def result_of(variant: str, found: Tried | None) -> Result:
    if found is None:
        return Result(variant, 0, 0, "does not fit at any length")
    return Result(variant, found.seq_len, found.peak_bytes, found.made_of)


def made_of(place: str, by_category: dict[str, int]) -> str:
    """Where the peak is and its largest owners, in words."""
    largest = sorted(by_category.items(), key=lambda item: -item[1])[:_LARGEST]
    parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in largest)
    return f"{place}: {parts}"
