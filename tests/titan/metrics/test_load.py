"""Load statistics against plain Python in float64 and against values known by hand."""

import math
import random

import pytest
import torch

from titan_relay.titan.metrics.load import load_curves, load_stats


def test_even_load() -> None:
    stats = load_stats(torch.full((3, 8), 5))
    assert stats["max_share"].tolist() == [1 / 8] * 3
    # log and a sum of eight terms: a few units in the last place.
    assert stats["entropy"].tolist() == pytest.approx([1.0] * 3, rel=1e-14)
    assert stats["dead_experts"].tolist() == [0, 0, 0]


def test_one_expert_takes_all() -> None:
    stats = load_stats(torch.tensor([[0, 9, 0, 0]]))
    assert stats["max_share"].tolist() == [1.0]
    assert stats["entropy"].tolist() == [0.0]
    assert stats["dead_experts"].tolist() == [3]


def test_half_of_the_experts_evenly() -> None:
    stats = load_stats(torch.tensor([[4.0, 4.0, 0.0, 0.0]]))
    assert stats["max_share"].tolist() == [0.5]
    assert stats["entropy"].tolist() == pytest.approx([0.5], rel=1e-14)
    assert stats["dead_experts"].tolist() == [2]


def test_no_tokens_and_a_single_expert_are_ordinary() -> None:
    empty = load_stats(torch.zeros(1, 4, dtype=torch.int64))
    assert (empty["max_share"].item(), empty["entropy"].item()) == (0.0, 0.0)
    assert empty["dead_experts"].item() == 4
    single = load_stats(torch.tensor([[7], [0]]))
    assert single["max_share"].tolist() == [1.0, 0.0]
    assert single["entropy"].tolist() == [1.0, 0.0]
    assert single["dead_experts"].tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_random_loads_agree_with_plain_python(seed: int) -> None:
    generator = random.Random(seed)
    tokens = [[generator.choice((0, 1, 17, 2**40)) for _ in range(13)] for _ in range(4)]
    tokens[0][0] = 1
    stats = load_stats(torch.tensor(tokens))
    for row, counts in enumerate(tokens):
        total = sum(counts)
        if total == 0:
            continue
        entropy = -sum(c / total * math.log(c / total) for c in counts if c) / math.log(13)
        assert stats["max_share"][row].item() == pytest.approx(max(counts) / total, rel=1e-14)
        # Cancellation near an entropy of 0 costs digits; the absolute error stays tiny.
        assert stats["entropy"][row].item() == pytest.approx(entropy, rel=1e-12, abs=1e-15)
        assert stats["dead_experts"][row].item() == counts.count(0)


def test_curves_name_layers_and_the_worst_of_them() -> None:
    curves = load_curves(torch.tensor([[1, 1], [3, 0]]), layer_ids=(2, 11))
    assert curves["moe/load/layer_02/max_share"] == 0.5
    assert curves["moe/load/layer_11/dead_experts"] == 1.0
    assert curves["moe/load/worst/max_share"] == 1.0
    assert curves["moe/load/worst/entropy"] == 0.0
    assert curves["moe/load/worst/dead_experts"] == 1.0
    assert load_curves(torch.zeros(0, 4), ()) == {}
