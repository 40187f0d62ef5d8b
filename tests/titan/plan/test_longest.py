"""The searches for the longest sequence and for the largest batch, over made-up memory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.titan.runs import a_run, config_file, layout, load_run
from titan_relay.config import RunConfig, degrees_of
from titan_relay.titan.plan.longest import Tried, longest, longest_of, unit_of

LIMIT = 1_000_000


@pytest.mark.parametrize(
    ("bytes_of", "answer"),
    [
        (lambda length: 1000 + 7 * length, 142_336),  # (1e6 - 1000) / 7 = 142,714
        (lambda length: 20 * length, 49_664),
        # A jump, as where another ring is chosen, between 64 units and what would fit before it.
        (lambda length: 3 * length + (900_000 if length > 64 * 512 else 0), 33_280),
        (lambda length: length * length // 4096, 64_000),
    ],
)
@pytest.mark.parametrize("first", [1, 4096, 10**6])
def test_the_longest_that_fits(bytes_of: Callable[[int], int], answer: int, first: int) -> None:
    tries: list[int] = []

    def peak(length: int) -> Tried:
        tries.append(length)
        return Tried(length, bytes_of(length), "")

    found = longest(peak, 512, LIMIT, first)
    assert found is not None
    assert found.peak_bytes <= LIMIT
    # Within one unit or 1%.
    assert answer - max(512, answer / 100) <= found.seq_len <= answer
    assert len(tries) == len(set(tries)) <= 20


@pytest.mark.parametrize(("bytes_per_token", "answer"), [(1000, 1000), (9000, 110), (10**7, None)])
def test_short_sequences_are_tried_where_128_tokens_do_not_fit(
    tmp_path: Path, bytes_per_token: int, answer: int | None
) -> None:
    run = load_run(config_file(tmp_path).parent, a_run("", **layout(cp=2)))
    degrees = degrees_of(run, 2)
    unit = unit_of(run, degrees)

    def peak(length: int) -> Tried:
        return Tried(length, length * bytes_per_token, "")

    found = longest_of(peak, run, degrees, LIMIT, 4096)
    if answer is None:
        assert found is None
        return
    assert found is not None
    assert found.seq_len % unit == 0
    assert answer - max(unit, 256 if answer >= 256 else 0) < found.seq_len <= answer


def test_nothing_fits() -> None:
    assert longest(lambda length: Tried(length, LIMIT + length, ""), 512, LIMIT, 4096) is None


@pytest.mark.parametrize(
    ("fits", "batches"),
    [(0, {}), (1, {"full": 1, "output": 2}), (3, {"full": 3, "output": 6})],
)
def test_the_largest_batch_of_each_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: int, batches: dict[str, int]
) -> None:
    """``fits`` sequences that keep everything fit, and twice as many that keep the output."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    from budget.candidates import within_budget

    run = load_run(config_file(tmp_path).parent, a_run("", **layout(ep=2)))
    cost = {"full": 10, "output": 5, "recompute": 1_000}
    tries: list[tuple[str, int]] = []

    def peak(candidate: RunConfig) -> int:
        level, batch = candidate.attention_retention.mode, candidate.training.local_batch_size
        tries.append((level, batch))
        return cost[level] * batch

    budget = 10 * fits + 4
    choices = list(within_budget(run, "relay-recompute", 64, budget, peak))
    assert {choice.retention: choice.local_batch_size for choice in choices} == batches
    assert all(choice.peak_bytes <= budget for choice in choices)
    assert len(tries) == len(set(tries)) <= 16
