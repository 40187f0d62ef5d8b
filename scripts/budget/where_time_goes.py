"""The operators that take most of a step's time on this rank, by torch's own profiler."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Share:
    """One operator, without those that it calls: its part of the step's time, and its calls."""

    operator: str
    share: float
    num_calls: int

    def line(self) -> str:
        return f"  {100 * self.share:5.1f}%  {self.num_calls:>7,}  {self.operator}"


def largest_shares(step: Callable[[], object], num: int) -> list[Share]:
    """The `num` operators with the most time of their own in one call of `step`.

    What runs between operators, such as Python and waiting for other ranks, counts to the operator
    around it, or to none.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    averages = [each for each in profiled.key_averages() if each.self_cpu_time_total > 0]
    averages.sort(key=lambda each: -each.self_cpu_time_total)
    total = sum(each.self_cpu_time_total for each in averages)
    return [Share(each.key, each.self_cpu_time_total / total, each.count) for each in averages][
        :num
    ]
