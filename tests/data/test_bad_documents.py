"""Every kind of bad document is named with file and row, counted or stopped at, never spun on."""

import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.support import EOS, byte_tokenizer, open_reader, read_numbers, write_jsonl
from titan_relay.config.schema_data import DataConfig
from titan_relay.data import DataError, num_valid_tokens

GOOD = '{"text": "<1>good"}\n'

BAD_LINES = [
    ('{"text": ""}', "the text is empty"),
    ('{"text": null}', "the text is null"),
    ('{"body": "x", "id": 3}', 'no column "text" (data.text_column); columns present: body, id'),
    ('{"text": 5}', "the text is int, not a string"),
    ('{"text": ["a"]}', "the text is list, not a string"),
    ('{"text": "\\ud83d"}', "lone surrogate U+D83D at character 0"),
    ('{"text": "half', "not valid JSON"),
    ("[" * 100_000, "not valid JSON"),
    ('"text"', "str where an object was expected"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_stop_names_file_line_and_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(line + "\n" + GOOD)
    config = DataConfig(files=(str(path),), bad_documents="stop", shuffle=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1)
    with pytest.raises(DataError) as caught:
        next(reader)
    assert f"{path}, line 1: {reason}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_skip_counts_warns_and_goes_on(
    tmp_path: Path, line: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(line + "\n" + GOOD)
    config = DataConfig(files=(str(path),), shuffle=False, infinite=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1)
    with caplog.at_level(logging.WARNING, "titan_relay.data"):
        row = next(reader)
    assert read_numbers([row]) == [1]
    assert reader.num_skipped == {"data": 1}
    assert f"{path}, line 1: {reason}" in caplog.text


def test_invalid_utf8_names_byte_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(GOOD.encode() + b'{"text": "a\xff"}\n')
    config = DataConfig(files=(str(path),), bad_documents="stop", shuffle=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1)
    with pytest.raises(DataError, match=r"line 2: invalid UTF-8: byte 0xff at offset 11"):
        reader.next_rows(3)


def test_blank_lines_are_no_documents(tmp_path: Path) -> None:
    """Not even under "stop"; a byte-order mark and Windows line ends are no fault either."""
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "<1>a"}\r\n\r\n   \n{"text": "<2>b"}')
    config = DataConfig(files=(str(path),), bad_documents="stop", shuffle=False, infinite=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1)
    assert read_numbers([next(reader)]) == [1, 2]
    assert reader.num_skipped == {"data": 0}


def test_a_five_megabyte_line_fills_row_after_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["x" * 5_000_000])
    config = DataConfig(files=(str(path),), infinite=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1, seq_len=1_000_000)
    assert [num_valid_tokens(next(reader)["labels"]) for _ in range(6)] == [1_000_000] * 5 + [0]


def test_only_the_first_warnings_are_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["good"] + [None] * 50 + ["good"])
    config = DataConfig(files=(str(path),), shuffle=False, infinite=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1)
    with caplog.at_level(logging.WARNING, "titan_relay.data"):
        next(reader)
    assert reader.num_skipped == {"data": 50}
    assert len(caplog.records) == 6
    assert "only counted" in caplog.text


@pytest.mark.parametrize("infinite", [True, False])
@pytest.mark.parametrize(
    ("content", "first"),
    [
        ('{"text": ""}\n' * 5, "line 1: the text is empty"),
        ("\n\n" + '{"text": null}\n' * 3, "line 3: the text is null"),
        ('{"body": "x"}\n' * 3, "columns present: body"),
        ("\n\n\n", "line 1: blank line"),
    ],
)
def test_a_corpus_of_bad_documents_ends_at_once(
    tmp_path: Path, infinite: bool, content: str, first: str
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    config = DataConfig(files=(str(path),), infinite=infinite)
    with pytest.raises(DataError) as caught:
        open_reader(config, byte_tokenizer(tmp_path))
    assert "documents is usable" in str(caught.value)
    assert first in str(caught.value)


def test_documents_of_one_token_predict_nothing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["a", "b"])
    tokenizer = byte_tokenizer(tmp_path, add_eos=False)
    with pytest.raises(DataError, match="the text is a single token"):
        open_reader(DataConfig(files=(str(path),)), tokenizer)


def test_a_lane_that_only_ever_meets_bad_documents_stops(tmp_path: Path) -> None:
    """Unshuffled, lane 1 of 2 reads the odd documents of every epoch: all empty here."""
    path = write_jsonl(tmp_path / "d.jsonl", ["good", "", "good", ""])
    config = DataConfig(files=(str(path),), shuffle=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=2)
    next(reader)
    with pytest.raises(DataError, match="lane 1 of 2 met 5 bad documents in a row"):
        next(reader)


def test_plain_text_files_are_one_document_each(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("<1>one\nstill one\n")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "d.txt").write_text("<2>two")
    config = DataConfig(files=(str(tmp_path / "*.txt"),), shuffle=False, infinite=False)
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1, seq_len=64)
    row = next(reader)
    assert read_numbers([row]) == [1, 2]
    assert np.count_nonzero(row["labels"] == EOS) == 2
    assert reader.num_skipped == {"data": 2}


def test_json_file_may_be_a_list_or_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "<1>"}, {"text": None}, 7], indent=1))
    (tmp_path / "b.json").write_text('{"text": "<2>"}\n{"text": "<3>"}\n')
    files = (str(tmp_path / "*.json"),)
    tokenizer = byte_tokenizer(tmp_path)
    reader = open_reader(
        DataConfig(files=files, shuffle=False, infinite=False), tokenizer, num_lanes=1
    )
    assert read_numbers([next(reader)]) == [1, 2, 3]
    stopping = DataConfig(files=files, shuffle=False, bad_documents="stop")
    with pytest.raises(DataError, match=r"a\.json, row 2: the text is null"):
        open_reader(stopping, tokenizer, num_lanes=1).next_rows(2)


def write_parquet(path: Path, values: list[str | None], column: str = "text") -> Path:
    pq.write_table(pa.table({column: values, "id": list(range(len(values)))}), path)
    return path


def test_parquet_rows_are_read_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_parquet(tmp_path / "a.parquet", ["<1>", "<2>"])
    write_parquet(tmp_path / "b.parquet", ["<3>", None, "", "<4>"])
    files = (str(tmp_path / "*.parquet"),)
    tokenizer = byte_tokenizer(tmp_path)
    config = DataConfig(files=files, shuffle=False, infinite=False)
    reader = open_reader(config, tokenizer, num_lanes=1)
    assert read_numbers([next(reader)]) == [1, 2, 3, 4]
    assert reader.num_skipped == {"data": 2}
    stopping = DataConfig(files=files, shuffle=False, bad_documents="stop")
    with pytest.raises(DataError, match=r"b\.parquet, row 2: the text is null"):
        open_reader(stopping, tokenizer, num_lanes=1).next_rows(2)


def test_parquet_with_invalid_utf8_names_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    raw = pa.array([b"good", b"a\xff"], type=pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": raw}), tmp_path / "a.parquet")
    config = DataConfig(files=(str(tmp_path / "a.parquet"),), shuffle=False, bad_documents="stop")
    reader = open_reader(config, byte_tokenizer(tmp_path), num_lanes=1)
    with pytest.raises(DataError, match=r"a\.parquet, row 2: invalid UTF-8 at offset 1"):
        reader.next_rows(2)


def test_unusable_files_are_refused_with_the_fix(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x"], column="body")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "int.parquet")
    (tmp_path / "no.parquet").write_text("not parquet")
    (tmp_path / "bad.json").write_text("[1, 2")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "x.csv").write_text("a")
    tokenizer = byte_tokenizer(tmp_path)
    cases = [
        ("a.parquet", 'no column "text" (data.text_column); columns present: body, id'),
        ("int.parquet", 'column "text" (data.text_column) holds int64, not strings'),
        ("no.parquet", "is not a readable Parquet file"),
        ("bad.json", "is not valid JSON"),
        ("empty.jsonl", "no documents in"),
        ("x.csv", 'x.csv": must end in .jsonl, .json, .parquet or .txt'),
        ("*.arrow", "matches no file"),
        ("", "is a folder; name its files"),
    ]
    for name, message in cases:
        with pytest.raises(DataError) as caught:
            open_reader(DataConfig(files=(str(tmp_path / name),)), tokenizer)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_one_good_document_among_many_bad_ones_is_found_by_every_lane(tmp_path: Path) -> None:
    """Shuffled, a lane meets the one good document about once in 60: not a reason to give up."""
    path = write_jsonl(tmp_path / "d.jsonl", ["<1>good", *[""] * 59])
    reader = open_reader(DataConfig(files=(str(path),)), byte_tokenizer(tmp_path))
    for _ in range(20):
        assert num_valid_tokens(reader.next_rows()["labels"]) == 4 * 16
