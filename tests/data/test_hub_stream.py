"""Streamed datasets: same lanes, exact resume, on folders that stand in for the hub."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.support import (
    byte_tokenizer,
    equal_rows,
    numbered_texts,
    open_reader,
    read_numbers,
    write_jsonl,
)
from titan_relay.config.schema_data import DataConfig
from titan_relay.data import DataError, num_valid_tokens


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("titan_relay.data.hub_stream.WINDOW_DOCUMENTS", 7)
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
    source = resumed._sources[0].source
    assert source._shard == 2  # type: ignore[attr-defined]
    assert source._next_index >= 26  # type: ignore[attr-defined]


def test_memory_stays_at_a_few_windows(tmp_path: Path, folder: Path) -> None:
    reader = open_reader(DataConfig(dataset=str(folder)), byte_tokenizer(tmp_path))
    source = reader._sources[0].source
    for _ in range(300):  # about 12 epochs; lanes drift apart by some tens of documents
        reader.next_rows()
        assert len(source._held) < 80  # type: ignore[attr-defined]
        assert len(source._bookmarks) < 20  # type: ignore[attr-defined]


def test_a_finite_stream_ends_in_padding(tmp_path: Path, folder: Path) -> None:
    config = DataConfig(dataset=str(folder), infinite=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), seq_len=64)
    total = 0
    while valid := num_valid_tokens(reader.next_rows()["labels"]):
        total += valid
    assert total == sum(map(len, numbered_texts(40)))
    assert reader.exhausted


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


def test_a_wrong_column_is_noticed_early(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_relay.data.hub_stream._MAX_BAD_AT_START", 10)
    config = DataConfig(dataset=str(folder), text_column="content")
    with pytest.raises(DataError) as caught:
        open_reader(config, byte_tokenizer(tmp_path)).next_rows()
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
