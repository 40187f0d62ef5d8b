"""What a variant may choose within the budget: how many sequences at a time, and what it keeps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from titan_relay.config import RunConfig, with_length, with_settings


@dataclass(frozen=True)
class Choice:
    """One way to spend the budget. peak_bytes: of the largest rank, in a step after the first."""

    variant: str
    local_batch_size: int
    retention: str
    run: RunConfig
    peak_bytes: int = 0


def within_budget(
    run: RunConfig,
    variant: str,
    seq_len: int,
    budget_bytes: int,
    peak_of: Callable[[RunConfig], int],
) -> Iterator[Choice]:
    """For each level of retention the largest batch that fits; richest level first. `run` is the
    variant's."""
    base = with_length(run, seq_len)
    for level in _levels(base):
        best: Choice | None = None
        low, high = 0, None  # a batch of `low` fits and one of `high` does not
        while high is None or high - low > 1:
            batch = max(1, 2 * low) if high is None else (low + high) // 2
            choice = _choice(base, variant, level, batch)
            peak_bytes = peak_of(choice.run)
            if peak_bytes > budget_bytes:
                high = batch
            else:
                low, best = batch, replace(choice, peak_bytes=peak_bytes)
        if best is not None:
            yield best


def _levels(run: RunConfig) -> tuple[str, ...]:
    """Retention is the relay's to choose; the all-to-all's variant says what is recomputed."""
    return ("full", "output", "recompute") if run.relay.dispatcher == "relay" else ("",)


def _choice(base: RunConfig, variant: str, level: str, batch: int) -> Choice:
    settings: dict[str, object] = {"training.local_batch_size": batch}
    if level:
        settings["attention_retention.mode"] = level
    return Choice(variant, batch, level or "as the variant says", with_settings(base, settings))
