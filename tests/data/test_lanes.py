"""Packed rows against a slow packer, and their independence of the number of ranks."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.support import (
    EOS,
    byte_tokenizer,
    equal_rows,
    numbered_texts,
    open_reader,
    read_numbers,
    write_jsonl,
)
from titan_relay.config.schema_data import DataConfig
from titan_relay.data import IGNORE_INDEX, num_valid_tokens


def pack_slowly(texts: list[str], seq_len: int) -> list[list[tuple[int, int, int]]]:
    """Rows of (input, label, position), written from the definition; the last one is padded."""
    stream = []
    for text in texts:
        ids = [*text.encode(), EOS]
        stream += [(ids[i], ids[i + 1], i == 0) for i in range(len(ids) - 1)]
    rows = []
    for start in range(0, len(stream), seq_len):
        row: list[tuple[int, int, int]] = []
        for token, label, begins in stream[start : start + seq_len]:
            position = 0 if begins or not row else row[-1][2] + 1
            row.append((token, label, position))
        rows.append(row + [(EOS, IGNORE_INDEX, 0)] * (seq_len - len(row)))
    return rows


def lane_texts(texts: list[str], lane: int, num_lanes: int) -> list[str]:
    return texts[lane::num_lanes]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    num_lanes=st.integers(1, 5),
    seq_len=st.integers(1, 24),
)
def test_rows_are_those_of_a_slow_packer(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], num_lanes: int, seq_len: int
) -> None:
    folder = tmp_path_factory.mktemp("lanes")
    texts = [chr(97 + index) * length for index, length in enumerate(lengths)]
    path = write_jsonl(folder / "d.jsonl", texts)
    config = DataConfig(files=(str(path),), shuffle=False, infinite=False)
    reader = open_reader(config, byte_tokenizer(folder), num_lanes=num_lanes, seq_len=seq_len)
    expected = [pack_slowly(lane_texts(texts, g, num_lanes), seq_len) for g in range(num_lanes)]
    padding = [(EOS, IGNORE_INDEX, 0)] * seq_len
    for step in range(max(len(rows) for rows in expected) + 1):
        batch = reader.next_rows()
        for lane, rows in enumerate(expected):
            want = np.array(rows[step] if step < len(rows) else padding)
            for column, key in enumerate(("input", "labels", "positions")):
                assert batch[key].dtype == np.int64
                assert np.array_equal(batch[key][lane], want[:, column])


def test_a_label_never_belongs_to_the_next_document(tmp_path: Path) -> None:
    """Where a document starts, the place before it has EOS as its label, never as its input."""
    path = write_jsonl(tmp_path / "d.jsonl", numbered_texts(10))
    reader = open_reader(
        DataConfig(files=(str(path),)), byte_tokenizer(tmp_path), num_lanes=1, seq_len=64
    )
    for _ in range(5):
        row = next(reader)
        starts = np.flatnonzero(row["positions"][1:] == 0)
        assert np.all(row["labels"][starts] == EOS)
        assert not np.any(row["input"] == EOS)


def test_a_document_longer_than_the_context_goes_on_in_the_next_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["abcdefghij"])
    config = DataConfig(files=(str(path),), infinite=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1, seq_len=4)
    rows = [next(reader) for _ in range(4)]
    assert [bytes(row["input"].astype(np.uint8)) for row in rows[:2]] == [b"abcd", b"efgh"]
    assert [row["positions"].tolist() for row in rows[:2]] == [[0, 1, 2, 3]] * 2
    assert rows[1]["labels"].tolist() == list(b"fghi")
    assert rows[2]["labels"].tolist() == [ord("j"), EOS, IGNORE_INDEX, IGNORE_INDEX]
    assert rows[2]["positions"].tolist() == [0, 1, 0, 0]
    assert [num_valid_tokens(row["labels"]) for row in rows] == [4, 4, 2, 0]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("infinite", [True, False])
def test_samples_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path, num_ranks: int, infinite: bool
) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", numbered_texts(23))
    config = DataConfig(files=(str(path),), infinite=infinite)
    tokenizer = byte_tokenizer(tmp_path)
    alone = open_reader(config, tokenizer, num_lanes=8)
    share = 8 // num_ranks
    ranks = [
        open_reader(config, tokenizer, num_lanes=8, lanes=range(r * share, (r + 1) * share))
        for r in range(num_ranks)
    ]
    for _ in range(12):
        batch = alone.next_rows()
        parts = [rank.next_rows() for rank in ranks]
        joined = {key: np.concatenate([part[key] for part in parts]) for key in batch}
        assert equal_rows(batch, joined)


def test_every_epoch_has_every_document_once_in_another_order(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", numbered_texts(40))
    reader = open_reader(
        DataConfig(files=(str(path),)), byte_tokenizer(tmp_path), num_lanes=1, seq_len=64
    )
    numbers = read_numbers([next(reader) for _ in range(80)])
    epochs = [numbers[start : start + 40] for start in range(0, 120, 40)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_the_seed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", numbered_texts(40))
    config, tokenizer = DataConfig(files=(str(path),)), byte_tokenizer(tmp_path)
    first = open_reader(config, tokenizer, seed=1).next_rows()
    assert equal_rows(first, open_reader(config, tokenizer, seed=1).next_rows())
    assert not equal_rows(first, open_reader(config, tokenizer, seed=2).next_rows())


def test_a_finite_reader_gives_every_document_once_then_padding(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", numbered_texts(41))
    config = DataConfig(files=(str(path),), infinite=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), seq_len=32)
    batches = []
    while num_valid_tokens((batch := reader.next_rows())["labels"]):
        batches.append(batch)
    numbers: list[int] = []
    for lane in range(4):
        numbers += read_numbers([{k: b[k][lane] for k in b} for b in batches])
    assert sorted(numbers) == list(range(41))
    assert num_valid_tokens(reader.next_rows()["labels"]) == 0


def test_more_lanes_than_documents(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", numbered_texts(3))
    tokenizer = byte_tokenizer(tmp_path)
    endless = open_reader(DataConfig(files=(str(path),)), tokenizer, num_lanes=16, seq_len=64)
    assert num_valid_tokens(endless.next_rows()["labels"]) == 16 * 64
    finite = DataConfig(files=(str(path),), infinite=False)
    reader = open_reader(finite, tokenizer, num_lanes=16, seq_len=64)
    assert num_valid_tokens(reader.next_rows()["labels"]) == sum(map(len, numbered_texts(3)))
    assert num_valid_tokens(reader.next_rows()["labels"]) == 0


def test_without_eos_pads_are_still_told_by_their_labels(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["abc"])
    config = DataConfig(files=(str(path),), infinite=False)
    tokenizer = byte_tokenizer(tmp_path, add_eos=False, eos_token=None)
    row = next(open_reader(config, tokenizer, num_lanes=1, seq_len=4))
    assert row["input"].tolist() == [97, 98, 0, 0]
    assert row["labels"].tolist() == [98, 99, IGNORE_INDEX, IGNORE_INDEX]
