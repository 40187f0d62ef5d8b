"""A lane: one independent, deterministic stream of packed rows.

A run has as many lanes as its global batch has rows, and step `n` trains on row `n` of every
lane. Lane `g` of `G` reads the documents whose running index is `g` modulo `G`. Nothing here
knows about ranks, so the samples of a step do not depend on their number.

Packing follows torchtitan 0.3's text loader: a document of `n` ids gives `n - 1` (input, label)
pairs, so the last id of a document is never asked to predict the next document. A document
that does not fit goes on in the next row. Positions count from 0 at the start of every document
and at the start of every row; attention never reaches across a position 0.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from titan_relay.data.documents import BadDocument, DataError, SkipPolicy
from titan_relay.data.order import choose_source
from titan_relay.data.sources import WeightedSource
from titan_relay.data.tokenizer import Tokenizer

IGNORE_INDEX = -100

PackedRow = dict[str, np.ndarray]
"""``input``, ``labels`` and ``positions``: int64 [seq_len] each.

A pad has label -100 (no other place has), the pad id as input, and position 0, which makes every
pad a document of its own.
"""


@dataclass
class LaneState:
    """All that a lane remembers between rows; lists have one entry for each source.

    `current` is the source of a document that is only partly used up (-1: none), `offset` the
    number of its pairs already used. The document's tokens are not kept: they are read again.
    """

    num_rows: int
    num_valid_tokens: int
    cursors: list[int]  # documents taken, good or bad
    num_tokens: list[int]  # pairs of the documents taken
    num_skipped: list[int]
    is_open: list[bool]  # False once a finite source has ended for this lane
    current: int = -1
    offset: int = 0


class Lane:
    """Lane `lane` of `num_lanes` over `sources`; see the module for what its rows are."""

    def __init__(
        self,
        lane: int,
        num_lanes: int,
        sources: Sequence[WeightedSource],
        tokenizer: Tokenizer,
        skips: SkipPolicy,
        seq_len: int,
    ) -> None:
        self.lane = lane
        self._num_lanes, self._seq_len = num_lanes, seq_len
        self._sources = [weighted.source for weighted in sources]
        self._shares = [weighted.share for weighted in sources]
        self._tokenizer, self._skips = tokenizer, skips
        self._pad_id = tokenizer.eos_id if tokenizer.eos_id is not None else 0
        n = len(sources)
        self.state = LaneState(0, 0, [0] * n, [0] * n, [0] * n, [True] * n)
        self._ids: np.ndarray | None = None

    def next_row(self) -> PackedRow:
        """The next row; all padding when every source of a finite lane has ended.

        Raises DataError for a bad document under "stop", and when a lane of an endless source
        has met `max_bad_in_a_row` bad documents.
        """
        row = {
            "input": np.full(self._seq_len, self._pad_id, dtype=np.int64),
            "labels": np.full(self._seq_len, IGNORE_INDEX, dtype=np.int64),
            "positions": np.zeros(self._seq_len, dtype=np.int64),
        }
        filled = 0
        while filled < self._seq_len and (ids := self._current_ids()) is not None:
            start = self.state.offset
            take = min(self._seq_len - filled, len(ids) - 1 - start)
            span = slice(filled, filled + take)
            row["input"][span] = ids[start : start + take]
            row["labels"][span] = ids[start + 1 : start + 1 + take]
            row["positions"][span] = np.arange(take)
            filled += take
            self._advance(take, len(ids) - 1)
        self.state.num_rows += 1
        self.state.num_valid_tokens += filled
        return row

    def _advance(self, take: int, num_pairs: int) -> None:
        self.state.offset += take
        if self.state.offset == num_pairs:
            self.state.current, self.state.offset, self._ids = -1, 0, None

    def _current_ids(self) -> np.ndarray | None:
        """Ids of the document being packed: the next one, or after a resume the same again."""
        if self._ids is None:
            if self.state.current >= 0:
                self._ids = self._read_again(self.state.current)
            else:
                self._ids = self._next_document()
        return self._ids

    def _next_document(self) -> np.ndarray | None:
        state, num_bad_in_a_row = self.state, 0
        while True:
            index = choose_source(self._shares, state.num_tokens, state.is_open, self.lane)
            if index is None:
                return None
            source = self._sources[index]
            row = source.read(self._running_index(index, state.cursors[index]))
            if row is None:
                state.is_open[index] = False
                continue
            state.cursors[index] += 1
            ids = [] if isinstance(row, BadDocument) else self._tokenizer.encode(row.text)
            if len(ids) > 1:
                state.current, state.offset = index, 0
                state.num_tokens[index] += len(ids) - 1
                return np.asarray(ids, dtype=np.int64)
            bad = row if isinstance(row, BadDocument) else BadDocument(row.where, _TOO_SHORT)
            self._skips.handle(source.name, bad)
            state.num_skipped[index] += not bad.blank_line
            num_bad_in_a_row += 1
            self._refuse_to_spin(index, num_bad_in_a_row, bad)

    def _refuse_to_spin(self, index: int, num_bad_in_a_row: int, last: BadDocument) -> None:
        limit = self._sources[index].max_bad_in_a_row
        if limit is not None and num_bad_in_a_row > limit:
            raise DataError(
                f"source {self._sources[index].name}: lane {self.lane} of {self._num_lanes} met "
                f"{num_bad_in_a_row} bad documents in a row and gives up; the last: "
                f"{last.where}: {last.reason}"
            )

    def _read_again(self, index: int) -> np.ndarray:
        row = self._sources[index].read(self._running_index(index, self.state.cursors[index] - 1))
        ids = self._tokenizer.encode(row.text) if row and not isinstance(row, BadDocument) else []
        if len(ids) - 1 <= self.state.offset:
            raise DataError(
                f"source {self._sources[index].name}: the document that lane {self.lane} was "
                "reading is no longer the same; the files changed since the checkpoint"
            )
        return np.asarray(ids, dtype=np.int64)

    def _running_index(self, index: int, cursor: int) -> int:
        return self.lane + cursor * self._num_lanes

    def running_indices(self) -> list[int]:
        """For each source, the running index of the document needed next (or needed again)."""
        return [
            self._running_index(index, cursor - (index == self.state.current))
            for index, cursor in enumerate(self.state.cursors)
        ]

    def dump(self) -> bytes:
        """The state and the streams' bookmarks as JSON."""
        marks = [
            source.bookmark(index)
            for source, index in zip(self._sources, self.running_indices(), strict=True)
        ]
        return json.dumps({**asdict(self.state), "bookmarks": marks}).encode()

    def restore(self, dumped: bytes) -> list[Sequence[int] | None]:
        """Takes over a dumped state; returns the bookmark of each source."""
        content = json.loads(dumped)
        bookmarks = content.pop("bookmarks")
        self.state = LaneState(**content)
        # A run that was finite may go on as an endless one.
        for index, source in enumerate(self._sources):
            self.state.is_open[index] |= source.infinite
        self._ids = None
        return bookmarks


_TOO_SHORT = "the text is a single token: nothing to predict"
