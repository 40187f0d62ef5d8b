"""What a variant may choose within the budget: how many sequences at a time, and what it keeps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from titan_relay.config import RunConfig, with_length, with_settings


@dataclass(frozen=True)
class Choice:
    """One way to spend the budget. peak_bytes: of the largest rank, in a step after the first."""

    variant: str
    local_batch_size: int
    retention: str
    run: RunConfig
    peak_bytes: int


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
    # Retention is the relay's to choose; the all-to-all's variant says what is recomputed.
    on_relay = run.relay.dispatcher == "relay"
    for level in ("full", "output", "recompute") if on_relay else ("",):
        best: Choice | None = None
        low, high = 0, None  # a batch of `low` fits and one of `high` does not
        while high is None or high - low > 1:
            batch = max(1, 2 * low) if high is None else (low + high) // 2
            settings: dict[str, object] = {"training.local_batch_size": batch}
            if level:
                settings["attention_retention.mode"] = level
            candidate = with_settings(base, settings)
            peak_bytes = peak_of(candidate)
            if peak_bytes > budget_bytes:
                high = batch
            else:
                keeps = level or "as the variant says"
                low, best = batch, Choice(variant, batch, keeps, candidate, peak_bytes)
        if best is not None:
            yield best
