"""Reading ahead changes neither rows nor saved positions, and hands errors on."""

import threading
import time
from pathlib import Path

import pytest

from tests.data.support import (
    byte_tokenizer,
    equal_rows,
    numbered_texts,
    open_reader,
    write_jsonl,
)
from titan_relay.config.schema_data import DataConfig
from titan_relay.data import DataError, LaneReader, PrefetchingReader


@pytest.fixture
def reader(tmp_path: Path) -> LaneReader:
    path = write_jsonl(tmp_path / "d.jsonl", numbered_texts(40))
    return open_reader(DataConfig(files=(str(path),)), byte_tokenizer(tmp_path))


@pytest.fixture
def plain(tmp_path: Path, reader: LaneReader) -> LaneReader:
    return open_reader(DataConfig(files=(str(tmp_path / "d.jsonl"),)), byte_tokenizer(tmp_path))


def test_rows_and_states_are_those_of_the_reader(reader: LaneReader, plain: LaneReader) -> None:
    ahead = PrefetchingReader(reader, max_rows_ahead=7)
    assert ahead.state_dict() == plain.state_dict()
    for _ in range(20):
        assert equal_rows(ahead.next_rows(), plain.next_rows())
        assert ahead.state_dict() == plain.state_dict()
    ahead.close()


def test_a_loaded_position_drops_what_was_read_ahead(reader: LaneReader, plain: LaneReader) -> None:
    ahead = PrefetchingReader(reader, max_rows_ahead=7)
    ahead.next_rows()
    state = ahead.state_dict()
    expected = [ahead.next_rows() for _ in range(5)]
    ahead.load_state_dict(state)
    assert all(equal_rows(ahead.next_rows(), rows) for rows in expected)
    plain.load_state_dict(state)
    assert all(equal_rows(plain.next_rows(), rows) for rows in expected)
    ahead.close()


def test_reading_ahead_is_bounded_and_ends_with_close(
    reader: LaneReader, plain: LaneReader
) -> None:
    ahead = PrefetchingReader(reader, max_rows_ahead=4)
    next(ahead)
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "data"]
    most = 1 + 4 + 1  # handed out, waiting, and the one in the thread's hands
    states = [plain.state_dict()]
    for _ in range(most):
        next(plain)
        states.append(plain.state_dict())
    assert reader.state_dict() in states


def test_an_error_is_raised_where_its_row_would_have_been(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["x" * 15, "y" * 15, None])
    config = DataConfig(files=(str(path),), shuffle=False, bad_documents="stop")
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1, seq_len=15)
    ahead = PrefetchingReader(reader, max_rows_ahead=8)
    start = ahead.state_dict()
    for _ in range(2):  # a loaded position leaves the error behind, until it is reached again
        assert [next(ahead)["input"][0] for _ in range(2)] == [ord("x"), ord("y")]
        for _ in range(2):
            with pytest.raises(DataError, match="line 3: the text is null"):
                next(ahead)
        ahead.load_state_dict(start)
    ahead.close()


def test_closing_does_not_wait_for_room_in_the_queue(reader: LaneReader) -> None:
    """Every validation closes a reader whose thread has read as far ahead as it may."""
    ahead = PrefetchingReader(reader, max_rows_ahead=2)
    next(ahead)
    time.sleep(0.03)
    start = time.perf_counter()
    ahead.close()
    assert time.perf_counter() - start < 0.05  # the thread looks up every 0.1 s by itself
