"""A saved position goes on exactly, on any number of ranks, or is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.support import (
    byte_tokenizer,
    equal_rows,
    numbered_texts,
    open_reader,
    read_numbers,
    write_jsonl,
)
from titan_relay.config.schema_data import DataConfig, MixtureEntry
from titan_relay.data import (
    DataError,
    LaneReader,
    PackedRow,
    Tokenizer,
    lane_key,
    num_valid_tokens,
)

NUM_LANES = 4


def open_ranks(
    config: DataConfig, tokenizer: Tokenizer, num_ranks: int, state: dict[str, Any] | None
) -> list[LaneReader]:
    """One reader for each data-parallel rank, all given the same gathered state."""
    share = NUM_LANES // num_ranks
    readers = []
    for rank in range(num_ranks):
        lanes = range(rank * share, (rank + 1) * share)
        reader = open_reader(config, tokenizer, num_lanes=NUM_LANES, lanes=lanes)
        if state is not None:
            reader.load_state_dict(state)
        readers.append(reader)
    return readers


def run(readers: Sequence[LaneReader], num_steps: int) -> list[PackedRow]:
    """The global batch of each step."""
    steps = []
    for _ in range(num_steps):
        parts = [reader.next_rows() for reader in readers]
        steps.append({key: np.concatenate([part[key] for part in parts]) for key in parts[0]})
    return steps


def gathered_state(readers: Sequence[LaneReader]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for reader in readers:
        state |= reader.state_dict()
    return state


def numbers_of_lanes(steps: Sequence[PackedRow]) -> list[list[int]]:
    return [
        read_numbers([{key: step[key][lane] for key in step} for step in steps])
        for lane in range(NUM_LANES)
    ]


@pytest.fixture
def corpus(tmp_path: Path) -> DataConfig:
    return DataConfig(files=(str(write_jsonl(tmp_path / "d.jsonl", numbered_texts(40))),))


@pytest.mark.parametrize("num_ranks", [4, 2, 1])
@pytest.mark.parametrize("stop", [3, 28])  # 40 documents are about 25 steps of 4 x 16 tokens
def test_nothing_is_lost_or_repeated_when_the_number_of_ranks_changes(
    tmp_path: Path, corpus: DataConfig, num_ranks: int, stop: int
) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    uninterrupted = run(open_ranks(corpus, tokenizer, 4, None), 80)
    before = open_ranks(corpus, tokenizer, 4, None)
    steps = run(before, stop)
    steps += run(open_ranks(corpus, tokenizer, num_ranks, gathered_state(before)), 80 - stop)
    assert all(map(equal_rows, steps, uninterrupted))

    for lane, numbers in enumerate(numbers_of_lanes(steps)):
        assert len(numbers) > 20, f"lane {lane} did not reach a third epoch"
    first_epoch = sorted(n for numbers in numbers_of_lanes(steps) for n in numbers[:10])
    second_epoch = sorted(n for numbers in numbers_of_lanes(steps) for n in numbers[10:20])
    assert first_epoch == second_epoch == list(range(40))


@pytest.mark.parametrize("num_ranks", [4, 1])
def test_a_finite_run_stopped_inside_its_padding_resumes(
    tmp_path: Path, corpus: DataConfig, num_ranks: int
) -> None:
    config, tokenizer = replace(corpus, infinite=False), byte_tokenizer(tmp_path)
    for stop in (20, 30, 60):
        uninterrupted = run(open_ranks(config, tokenizer, 1, None), 70)
        before = open_ranks(config, tokenizer, 2, None)
        run(before, stop)
        after = open_ranks(config, tokenizer, num_ranks, gathered_state(before))
        assert all(map(equal_rows, run(after, 70 - stop), uninterrupted[stop:]))


def test_resuming_twice_is_the_same_as_not_stopping(tmp_path: Path, corpus: DataConfig) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    uninterrupted = run(open_ranks(corpus, tokenizer, 1, None), 12)
    steps: list[PackedRow] = []
    state = None
    for num_ranks in (1, 4, 2):
        readers = open_ranks(corpus, tokenizer, num_ranks, state)
        steps += run(readers, 4)
        state = gathered_state(readers)
    assert all(map(equal_rows, steps, uninterrupted))


def test_a_step_stopped_between_its_micro_batches_goes_on_with_the_next_lane(
    tmp_path: Path, corpus: DataConfig
) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    whole = open_reader(corpus, tokenizer)
    expected = [next(whole) for _ in range(20)]
    reader = open_reader(corpus, tokenizer)
    for row in expected[:6]:
        assert equal_rows(next(reader), row)
    resumed = open_reader(corpus, tokenizer)
    resumed.load_state_dict(reader.state_dict())
    assert all(equal_rows(next(resumed), row) for row in expected[6:])


def test_saving_changes_nothing_and_the_state_is_small(tmp_path: Path, corpus: DataConfig) -> None:
    write_jsonl(tmp_path / "d.jsonl", ["x" * 1_000_000])
    tokenizer = byte_tokenizer(tmp_path)
    saving, plain = open_reader(corpus, tokenizer), open_reader(corpus, tokenizer)
    for _ in range(5):
        assert equal_rows(saving.next_rows(), plain.next_rows())
        state = saving.state_dict()
    lanes = [state[lane_key(lane)] for lane in range(NUM_LANES)]
    assert all(isinstance(entry, bytes) and len(entry) < 500 for entry in lanes)
    assert sorted(state) == sorted(
        [lane_key(g) for g in range(4)]
        + ["num_lanes", "seed", "seq_len", "data_fingerprint", "tokenizer_fingerprint"]
    )


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8), min_size=1, max_size=3),
    weights=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    infinite=st.booleans(),
    shuffle=st.booleans(),
    stops=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    ranks=st.lists(st.sampled_from([1, 2, 4]), min_size=4, max_size=4),
)
def test_any_mixture_resumes_at_any_step_on_any_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    weights: list[int],
    infinite: bool,
    shuffle: bool,
    stops: list[int],
    ranks: list[int],
) -> None:
    """Empty documents (length 0) are among them; each source has at least one good one."""
    folder = tmp_path_factory.mktemp("mixture")
    entries = []
    for index, source in enumerate(lengths):
        texts = ["good" + str(index)] * 2 + [chr(97 + index) * length for length in source]
        path = write_jsonl(folder / f"{index}.jsonl", texts)
        entries.append(
            MixtureEntry(name=str(index), weight=float(weights[index]), files=(str(path),))
        )
    # Unshuffled and endless, a lane can meet one bad document for ever, which is refused.
    config = DataConfig(
        mixture=tuple(entries), infinite=infinite and shuffle, shuffle=shuffle, bad_documents="skip"
    )
    tokenizer = byte_tokenizer(folder)
    uninterrupted = run(open_ranks(config, tokenizer, 1, None), sum(stops) + 6)
    state, steps = None, list[PackedRow]()
    for num_steps, num_ranks in zip([*stops, 6], ranks, strict=False):
        readers = open_ranks(config, tokenizer, num_ranks, state)
        steps += run(readers, num_steps)
        state = gathered_state(readers)
    assert all(map(equal_rows, steps, uninterrupted))


def test_a_changed_run_is_refused_with_the_key_to_set_back(
    tmp_path: Path, corpus: DataConfig
) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    state = open_reader(corpus, tokenizer).state_dict()
    other = DataConfig(files=(str(write_jsonl(tmp_path / "e.jsonl", numbered_texts(39))),))
    cases = [
        (open_reader(corpus, tokenizer, num_lanes=8), "global batch was 4 rows"),
        (open_reader(corpus, tokenizer, seed=2), "debug.seed"),
        (open_reader(corpus, tokenizer, seq_len=32), "training.seq_len"),
        (open_reader(other, tokenizer), "not those of the checkpoint"),
        (open_reader(replace(corpus, shuffle=False), tokenizer), "not those of the checkpoint"),
        (open_reader(corpus, byte_tokenizer(tmp_path, add_bos=True, bos_token="<|endoftext|>")),
         "tokenizer is not that of the checkpoint"),
    ]  # fmt: skip
    for reader, message in cases:
        with pytest.raises(DataError) as caught:
            reader.load_state_dict(state)
        assert message in str(caught.value)


def test_a_checkpoint_without_an_owned_lane_is_refused(tmp_path: Path, corpus: DataConfig) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    state = open_reader(corpus, tokenizer, lanes=range(2)).state_dict()
    with pytest.raises(DataError, match=r"no data position for lanes \[2, 3\]"):
        open_reader(corpus, tokenizer).load_state_dict(state)


def test_a_corpus_moved_to_another_folder_is_the_same_corpus(
    tmp_path: Path, corpus: DataConfig
) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    write_jsonl(moved / "d.jsonl", numbered_texts(40))
    reader = open_reader(replace(corpus, files=(str(moved / "d.jsonl"),)), tokenizer)
    reader.load_state_dict(open_reader(corpus, tokenizer).state_dict())


def test_a_finite_run_may_go_on_as_an_endless_one(tmp_path: Path, corpus: DataConfig) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    finite = open_reader(replace(corpus, infinite=False), tokenizer)
    while num_valid_tokens(finite.next_rows()["labels"]):
        pass
    ended = open_reader(replace(corpus, infinite=False), tokenizer)
    ended.load_state_dict(finite.state_dict())
    assert num_valid_tokens(ended.next_rows()["labels"]) == 0
    endless = open_reader(corpus, tokenizer)
    endless.load_state_dict(finite.state_dict())
    rows = [endless.next_rows() for _ in range(40)]
    again = sorted(n for numbers in numbers_of_lanes(rows) for n in numbers[:10])
    assert again == list(range(40))


def test_a_document_that_changed_under_the_checkpoint_is_noticed(
    tmp_path: Path, corpus: DataConfig
) -> None:
    """The fingerprint reads both ends of a file only; the middle is noticed when reached."""
    tokenizer = byte_tokenizer(tmp_path)
    reader = open_reader(corpus, tokenizer)
    reader.next_rows()
    state = reader.state_dict()
    lane = json.loads(state[lane_key(0)])
    lane["current"], lane["offset"] = 0, 10_000
    state[lane_key(0)] = json.dumps(lane).encode()
    resumed = open_reader(corpus, tokenizer)
    resumed.load_state_dict(state)
    with pytest.raises(DataError, match="the files changed since the checkpoint"):
        next(resumed)
