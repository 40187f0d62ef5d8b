"""What layers keep of attention for backward: a budget of bytes, spent where it saves most time.

A layer's levels, each keeping what the one before keeps and more:

- recompute: nothing of attention;
- output: the attention kernel's output and log-sum-exp, so that the kernel is not run again;
- full: also the projections into queries, keys and values, so that none of their GEMMs is.

Raising a layer by a level is a step with a price in bytes and a gain in seconds. Steps are taken in
order of gain per byte for as long as they fit, and none after the first that does not: so more
budget never leaves less retained, and the choice is a function of the numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["recompute", "output", "full"]


@dataclass(frozen=True)
class LayerCost:
    """One layer's prices and gains, for one microbatch on one rank.

    output_bytes, output_seconds: what level output keeps and saves. full_bytes, full_seconds: what
    level full keeps and saves on top of that.
    """

    layer: int
    output_bytes: int
    output_seconds: float
    full_bytes: int
    full_seconds: float

    def bytes_at(self, level: Level) -> int:
        """What the layer keeps at `level`."""
        if level == "recompute":
            return 0
        return self.output_bytes + (self.full_bytes if level == "full" else 0)

    def seconds_at(self, level: Level) -> float:
        """The recomputation that `level` saves."""
        if level == "recompute":
            return 0.0
        return self.output_seconds + (self.full_seconds if level == "full" else 0.0)


@dataclass(frozen=True)
class ChosenLevels:
    """The level of each layer, by its index.

    num_bytes: retained at most, over all microbatches that are alive together.
    seconds: recomputation saved a microbatch.
    """

    of_layer: dict[int, Level]
    num_bytes: int
    seconds: float

    @classmethod
    def of(
        cls, costs: Sequence[LayerCost], levels: dict[int, Level], microbatches_alive: int = 1
    ) -> ChosenLevels:
        """With what `levels` cost and save."""
        num_bytes = sum(cost.bytes_at(levels[cost.layer]) for cost in costs)
        seconds = sum(cost.seconds_at(levels[cost.layer]) for cost in costs)
        return cls(levels, num_bytes * microbatches_alive, seconds)

    def count(self, level: Level) -> int:
        """Layers at a level."""
        return sum(each == level for each in self.of_layer.values())


def choose_levels(
    costs: Sequence[LayerCost], budget_bytes: float, microbatches_alive: int = 1
) -> ChosenLevels:
    """Spend `budget_bytes` on the layers of `costs`.

    Args:
        microbatches_alive: how many microbatches are between their forward and backward at most;
            each keeps what its layers keep.
    """
    steps = [step for cost in costs for step in _steps(cost)]
    # A sort keeps the order of equals, so that equal layers are raised from the first on.
    steps.sort(key=lambda step: -step.seconds_per_byte)
    levels: dict[int, Level] = {cost.layer: "recompute" for cost in costs}
    spent_bytes = 0
    for step in steps:
        if (spent_bytes + step.num_bytes) * microbatches_alive > budget_bytes:
            break
        spent_bytes += step.num_bytes
        levels[step.layer] = step.level
    return ChosenLevels.of(costs, levels, microbatches_alive)


@dataclass(frozen=True)
class _Step:
    layer: int
    level: Level
    num_bytes: int
    seconds: float

    @property
    def seconds_per_byte(self) -> float:
        return self.seconds / max(1, self.num_bytes)


def _steps(cost: LayerCost) -> list[_Step]:
    """A layer's steps, the one with the greater gain per byte first."""
    output = _Step(cost.layer, "output", cost.output_bytes, cost.output_seconds)
    full = _Step(cost.layer, "full", cost.full_bytes, cost.full_seconds)
    if full.seconds_per_byte <= output.seconds_per_byte:
        return [output, full]
    # What makes the first step worth while is the second: both as one.
    return [_Step(cost.layer, "full", cost.bytes_at("full"), cost.seconds_at("full"))]
