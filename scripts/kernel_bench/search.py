"""Search a kernel's configuration: one parameter after another, keeping what is faster.

The parameters are nearly independent once tiles fit, and a full grid would take hours of compiling.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from relay_kernels.tuning import TunedConfig

# Values worth trying, by name; a parameter that a kernel's configuration lacks is left alone.
CHOICES: Mapping[str, Sequence[int | bool]] = {
    "BLOCK_M": (16, 32, 64, 128, 256),
    "BLOCK_N": (32, 64, 128, 256),
    "BLOCK_K": (32, 64, 128),
    "num_warps": (4, 8, 16),
    "num_stages": (2, 3, 4, 5),
    "GROUP_M": (4, 8, 16),
    "DESCRIPTORS": (False, True),
    "WARP_SPECIALIZE": (False, True),
}
_WORTHWHILE = 0.99  # of the best time so far: less gain than this is noise

# The milliseconds of a configuration, or None if it does not compile or does not fit.
Measure = Callable[[TunedConfig], float | None]


@dataclass(frozen=True)
class Found:
    """The best configuration, and the times before and after."""

    config: TunedConfig
    begin_ms: float
    best_ms: float


def search(
    begin: TunedConfig, measure: Measure, choices: Mapping[str, Sequence[int | bool]] = CHOICES
) -> Found:
    """Go through all parameters until a whole round brings nothing.

    Raises:
        ValueError: the configuration to begin with does not run.
    """
    begin_ms = measure(begin)
    if begin_ms is None:
        raise ValueError("the present configuration does not run on this device")
    best, best_ms, improves = begin, begin_ms, True
    seen = [begin]
    while improves:
        improves = False
        for name, values in choices.items():
            for candidate in _with_each(best, name, values):
                if candidate in seen:
                    continue
                seen.append(candidate)
                ms = measure(candidate)
                if ms is not None and ms < _WORTHWHILE * best_ms:
                    best, best_ms, improves = candidate, ms, True
    return Found(best, begin_ms, best_ms)


def _with_each(
    config: TunedConfig, name: str, values: Sequence[int | bool]
) -> Iterator[TunedConfig]:
    for value in values:
        if name == "num_warps":
            yield replace(config, num_warps=int(value))
        elif name == "num_stages":
            yield replace(config, num_stages=int(value))
        elif name in config.constexprs:
            yield replace(config, constexprs={**config.constexprs, name: value})
