"""Shares of a mixture are shares of tokens, in every lane, from the first step on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.support import (
    byte_tokenizer,
    numbered_texts,
    open_reader,
    read_numbers,
    write_jsonl,
)
from titan_relay.config import ConfigError
from titan_relay.config.schema_data import DataConfig, MixtureEntry
from titan_relay.data import DataError, num_valid_tokens
from titan_relay.data.order import choose_source


def mixture(folder: Path, *, infinite: bool = True) -> DataConfig:
    """Weights 3 : 1 over documents of 8 and of 120 tokens."""
    short = write_jsonl(folder / "short.jsonl", ["a" * 8] * 50)
    long = write_jsonl(folder / "long.jsonl", ["b" * 120] * 50)
    return DataConfig(
        infinite=infinite,
        mixture=(
            MixtureEntry(name="short", weight=3.0, files=(str(short),)),
            MixtureEntry(name="long", weight=1.0, files=(str(long),)),
        ),
    )


def test_weights_are_shares_of_tokens_not_of_documents(tmp_path: Path) -> None:
    reader = open_reader(mixture(tmp_path), byte_tokenizer(tmp_path), seq_len=64)
    rows = [reader.next_rows() for _ in range(60)]
    shares = np.array(
        [np.mean([row["input"][lane] == ord("b") for row in rows]) for lane in range(4)]
    )
    # Each lane is off by at most one long document: 120 of 3840 tokens.
    assert np.all(np.abs(shares - 0.25) < 120 / 3840)
    assert abs(shares.mean() - 0.25) < 0.03


def test_two_sources_of_the_same_size_go_in_orders_of_their_own(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", numbered_texts(40))
    orders = []
    for weights in ((1.0, 1e-9), (1e-9, 1.0)):  # one lane reads almost nothing of the other
        entries = zip(("first", "second"), weights, strict=True)
        config = DataConfig(
            mixture=tuple(MixtureEntry(name=n, weight=w, files=(str(path),)) for n, w in entries)
        )
        reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1, seq_len=64)
        orders.append(read_numbers([next(reader) for _ in range(24)])[:20])
    assert orders[0] != orders[1]


def test_the_first_step_is_a_mixture_already() -> None:
    first = [choose_source([0.5, 0.3, 0.2], [0, 0, 0], [True] * 3, lane) for lane in range(100)]
    counts = [first.count(index) for index in range(3)]
    assert counts == pytest.approx([50, 30, 20], abs=2)  # a low-discrepancy sequence


def test_the_source_furthest_behind_is_next() -> None:
    assert choose_source([0.5, 0.5], [10, 9], [True, True], 0) == 1
    assert choose_source([0.5, 0.5], [9, 10], [True, True], 0) == 0
    assert choose_source([0.9, 0.1], [80, 20], [True, True], 0) == 0
    assert choose_source([0.5, 0.5], [10, 10], [True, True], 0) == 0
    assert choose_source([0.9, 0.1], [80, 20], [False, True], 0) == 1
    assert choose_source([0.9, 0.1], [80, 20], [False, False], 0) is None


def test_what_a_source_had_does_not_move_those_that_are_left() -> None:
    """The low-discrepancy point is for lanes that have read nothing at all."""
    for lane in range(20):
        assert choose_source([0.5, 0.2, 0.3], [90, 0, 0], [False, True, True], lane) == 2


def test_another_weight_is_another_run(tmp_path: Path) -> None:
    """Every source keeps its share of the tokens, so a lane's next row would be another."""
    config, tokenizer = mixture(tmp_path), byte_tokenizer(tmp_path)
    state = open_reader(config, tokenizer).state_dict()
    short, long = config.mixture
    changed = replace(config, mixture=(replace(short, weight=4.0), long))
    with pytest.raises(DataError, match="not those of the checkpoint"):
        open_reader(changed, tokenizer).load_state_dict(state)
    doubled = replace(config, mixture=(replace(short, weight=6.0), replace(long, weight=2.0)))
    open_reader(doubled, tokenizer).load_state_dict(state)  # the same shares


def test_a_finite_mixture_reads_every_source_to_its_end(tmp_path: Path) -> None:
    reader = open_reader(mixture(tmp_path, infinite=False), byte_tokenizer(tmp_path), seq_len=64)
    total = num_long = 0
    while valid := num_valid_tokens((batch := reader.next_rows())["labels"]):
        total += valid
        num_long += np.count_nonzero(batch["input"] == ord("b"))
    assert total == 50 * 8 + 50 * 120
    assert num_long == 50 * 120


ENTRY = MixtureEntry(name="a", weight=1.0, files=("d.jsonl",))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(), "no documents; give data.files, data.dataset or data.mixture"),
        (DataConfig(files=("d.jsonl",), mixture=(ENTRY,)), "data.files is given too"),
        (DataConfig(mixture=(ENTRY, ENTRY)), 'the name "a" is there twice'),
        (DataConfig(mixture=(replace(ENTRY, files=()),)), "needs either dataset or files"),
        (DataConfig(mixture=(replace(ENTRY, weight=0.0),)), 'weight = 0.0 of "a" must be above 0'),
        (
            DataConfig(mixture=(replace(ENTRY, files=("none",)),)),
            'data.mixture "a" files: "none": no such file in ',
        ),
    ],
)
def test_impossible_mixtures_are_refused(
    config: DataConfig, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "d.jsonl", ["text"])
    with pytest.raises(ConfigError) as caught:
        open_reader(config, byte_tokenizer(tmp_path))
    assert message in str(caught.value)
