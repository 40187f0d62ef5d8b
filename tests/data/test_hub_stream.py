"""Streamed datasets: same lanes, exact resume, on folders that stand in for the hub."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.support import (
    byte_tokenizer,
    equal_rows,
    numbered_texts,
    read_numbers,
    write_jsonl,
)
from tests.data.support import open_reader as open_any_reader
from titan_relay.config.schema_data import DataConfig, MixtureEntry
from titan_relay.data import DataError, LaneReader, num_valid_tokens
from titan_relay.data.hub_stream import HubStream, StreamSizes

SMALL = StreamSizes(window=7)


def open_reader(*arguments: Any, sizes: StreamSizes = SMALL, **options: Any) -> LaneReader:
    return open_any_reader(*arguments, stream_sizes=sizes, **options)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 documents in three shards."""
    folder = tmp_path / "hub"
    folder.mkdir()
    texts = numbered_texts(40)
    for shard, (start, end) in enumerate([(0, 18), (18, 19), (19, 40)]):
        write_jsonl(folder / f"train-{shard}.jsonl", texts[start:end])
    return folder


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_has_every_document_once(tmp_path: Path, folder: Path, shuffle: bool) -> None:
    config = DataConfig(dataset=str(folder), shuffle=shuffle)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1, seq_len=64)
    numbers = read_numbers([next(reader) for _ in range(80)])
    epochs = [numbers[start : start + 40] for start in (0, 40, 80)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 3
    assert (epochs[0] == list(range(40))) is not shuffle
    assert (epochs[0] == epochs[1]) is not shuffle


@pytest.mark.parametrize("num_ranks", [4, 2, 1])
@pytest.mark.parametrize("infinite", [True, False])
def test_resume_is_exact_on_any_number_of_ranks(
    tmp_path: Path, folder: Path, num_ranks: int, infinite: bool
) -> None:
    config = DataConfig(dataset=str(folder), infinite=infinite)
    tokenizer = byte_tokenizer(tmp_path)
    whole = open_reader(config, tokenizer)
    expected = [whole.next_rows() for _ in range(60)]
    before = [open_reader(config, tokenizer, lanes=range(r * 2, r * 2 + 2)) for r in range(2)]
    done = 0
    for stop in (3, 17, 40):
        state = {}
        for reader in before:
            for _ in range(stop - done):
                reader.next_rows()
            state |= reader.state_dict()
        done = stop
        share = 4 // num_ranks
        after = [
            open_reader(config, tokenizer, lanes=range(r * share, (r + 1) * share))
            for r in range(num_ranks)
        ]
        for reader in after:
            reader.load_state_dict(state)
        for step in range(stop, stop + 20):
            parts = [reader.next_rows() for reader in after]
            joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            assert equal_rows(joined, expected[step])


def test_resume_opens_the_shard_of_the_bookmark_not_the_first(tmp_path: Path, folder: Path) -> None:
    config = DataConfig(dataset=str(folder), shuffle=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1, seq_len=64)
    numbers: list[int] = []
    while not numbers or numbers[-1] < 30:
        numbers += read_numbers([next(reader)])
    state = reader.state_dict()
    resumed = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1, seq_len=64)
    resumed.load_state_dict(state)
    for shard in (0, 1):
        (folder / f"train-{shard}.jsonl").write_text('{"text": "half')
    expected = [next(reader) for _ in range(3)]  # not yet the next epoch
    assert all(equal_rows(next(resumed), row) for row in expected)


def test_memory_stays_at_a_few_windows(folder: Path) -> None:
    entry = MixtureEntry(name="data", weight=1.0, dataset=str(folder))
    order = {"seed": 1, "shuffle": True, "infinite": True}
    source = HubStream(entry, **order, num_lanes=4, lanes=range(4), sizes=SMALL)
    for number in range(120):  # 12 epochs; the last lane is three documents of its own behind
        for lane in range(4):
            if lane < 3 or number >= 3:
                source.read(4 * (number - 3 * (lane == 3)) + lane)
        assert source.num_waiting < 30


def test_a_finite_stream_ends_in_padding(tmp_path: Path, folder: Path) -> None:
    config = DataConfig(dataset=str(folder), infinite=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), seq_len=64)
    total = 0
    while valid := num_valid_tokens(reader.next_rows()["labels"]):
        total += valid
    assert total == sum(map(len, numbered_texts(40)))


def test_bad_documents_of_a_stream_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ["<1>", None, "", "<2>"])
    config = DataConfig(dataset=str(folder), shuffle=False, infinite=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1)
    assert read_numbers([next(reader)]) == [1, 2]
    assert reader.num_skipped == {"data": 2}
    stopping = DataConfig(dataset=str(folder), shuffle=False, bad_documents="stop")
    with pytest.raises(DataError, match=r"shard 0, document 2: the text is null"):
        open_reader(stopping, byte_tokenizer(tmp_path), num_lanes=1).next_rows(2)


@pytest.mark.parametrize("infinite", [True, False])
def test_a_stream_of_bad_documents_ends(tmp_path: Path, infinite: bool) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [""] * 30)
    config = DataConfig(dataset=str(folder), infinite=infinite)
    reader = open_reader(config, byte_tokenizer(tmp_path), lanes=range(1, 2))
    with pytest.raises(DataError, match="none of the first 30 documents"):
        next(reader)


def test_a_wrong_column_is_noticed_early(tmp_path: Path, folder: Path) -> None:
    sizes = StreamSizes(window=7, max_bad_at_start=10)
    config = DataConfig(dataset=str(folder), text_column="content")
    with pytest.raises(DataError) as caught:
        open_reader(config, byte_tokenizer(tmp_path), sizes=sizes).next_rows()
    assert 'no column "content" (data.text_column); columns present: text' in str(caught.value)


def test_a_dataset_that_cannot_be_opened_is_one_line(tmp_path: Path, folder: Path) -> None:
    for config in (
        DataConfig(dataset=str(tmp_path / "nowhere")),
        DataConfig(dataset=str(folder), split="missing"),
    ):
        with pytest.raises(DataError) as caught:
            open_reader(config, byte_tokenizer(tmp_path))
        assert f'data.dataset = "{config.dataset}"' in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_broken_shard_names_itself(tmp_path: Path, folder: Path) -> None:
    (folder / "train-1.jsonl").write_text('{"text": "half')
    config = DataConfig(dataset=str(folder), shuffle=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1)
    with pytest.raises(DataError, match="shard 1"):
        reader.next_rows(100)
