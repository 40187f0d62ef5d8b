"""The reader of a data-parallel rank: the packed rows of the lanes it owns.

Lanes are described in `lane.py`. A rank that owns lanes ``a..b-1`` of `G` gets, for each step,
one row of each of them, in order. Its saved state is one entry for each lane, so a run goes on
with any number of ranks: each takes the entries of the lanes it owns now.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from titan_relay.config.schema_data import DataConfig
from titan_relay.data.documents import DataError, SkipPolicy
from titan_relay.data.hub_stream import STREAM_SIZES, StreamSizes
from titan_relay.data.lane import IGNORE_INDEX, Lane, PackedRow
from titan_relay.data.sources import build_sources
from titan_relay.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def lane_key(lane: int) -> str:
    """Key of a lane's entry in `LaneReader.state_dict()`."""
    return f"lane_{lane:06d}"


def num_valid_tokens(labels: np.ndarray) -> int:
    """How many labels of any shape are trained on: all but padding."""
    return int(np.count_nonzero(labels != IGNORE_INDEX))


class LaneReader:
    """Yields one row for each owned lane, in order, and again from the first: endlessly.

    A finite source's lanes go on with rows of padding, so that all ranks agree on the number of
    rows; the caller stops when a step has no valid token on any rank (`num_valid_tokens`).

    Args:
        num_lanes: rows of the global batch.
        lanes: the consecutive lanes this rank owns.
        seed: of the documents' order.
        stream_sizes: how much of a streamed dataset is read at a time.

    Raises:
        DataError: files missing or unusable (here), a bad document under "stop" (when read).
    """

    def __init__(
        self,
        data_config: DataConfig,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        num_lanes: int,
        lanes: range,
        seed: int,
        stream_sizes: StreamSizes = STREAM_SIZES,
    ) -> None:
        assert lanes.step == 1
        assert 0 <= lanes.start < lanes.stop <= num_lanes
        assert seq_len > 0
        self.lanes, self._num_lanes = lanes, num_lanes
        self._sources = build_sources(
            data_config,
            seed=seed,
            num_lanes=num_lanes,
            lanes=lanes,
            num_tokens=lambda text: len(tokenizer.encode(text)),
            stream_sizes=stream_sizes,
        )
        self._skips = SkipPolicy(data_config.bad_documents)
        self._lanes = [
            Lane(lane, num_lanes, self._sources, tokenizer, self._skips, seq_len) for lane in lanes
        ]
        self._identity: dict[str, int | str] = {
            "num_lanes": num_lanes,
            "seed": seed,
            "seq_len": seq_len,
            "data_fingerprint": self._fingerprint(data_config.shuffle),
            "tokenizer_fingerprint": tokenizer.fingerprint,
        }
        self._next = 0

    def _fingerprint(self, shuffle: bool) -> str:
        parts = [[w.source.name, w.share, w.source.fingerprint] for w in self._sources]
        return hashlib.sha256(json.dumps([shuffle, parts]).encode()).hexdigest()[:16]

    def __iter__(self) -> Iterator[PackedRow]:
        return self

    def __next__(self) -> PackedRow:
        return self.next_of_lane()[1]

    def next_of_lane(self) -> tuple[int, PackedRow]:
        """The next row and the number of its lane."""
        lane = self._lanes[self._next]
        row = lane.next_row()
        self._next = (self._next + 1) % len(self._lanes)
        return lane.lane, row

    def next_rows(self, num_rows: int | None = None) -> PackedRow:
        """The next rows stacked, [num_rows, seq_len] each; by default one for each owned lane."""
        rows = [next(self) for _ in range(num_rows or len(self._lanes))]
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    @property
    def num_skipped(self) -> dict[str, int]:
        """Bad documents skipped in the owned lanes since the start of the run, by source."""
        return {
            weighted.source.name: sum(lane.state.num_skipped[index] for lane in self._lanes)
            for index, weighted in enumerate(self._sources)
        }

    def dump_lane(self, lane: int) -> bytes:
        """The state entry of one owned lane: JSON, a few hundred bytes."""
        return self._lanes[lane - self.lanes.start].dump()

    def state_dict(self) -> dict[str, Any]:
        """Flat: `num_lanes`, `seed`, `seq_len`, two fingerprints, and bytes for each owned lane."""
        return {**self._identity, **{lane_key(g): self.dump_lane(g) for g in self.lanes}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken; it may hold other lanes' entries too.

        Raises DataError if the run's lanes would not be the same streams, or an owned lane's
        entry is missing.
        """
        for key, mine in self._identity.items():
            if state.get(key) != mine:
                raise DataError(_CHANGED[key].format(saved=state.get(key), mine=mine))
        missing = [g for g in self.lanes if lane_key(g) not in state]
        if missing:
            raise DataError(f"the checkpoint has no data position for lanes {missing[:8]}")
        bookmarks = [lane.restore(state[lane_key(lane.lane)]) for lane in self._lanes]
        running = [lane.running_indices() for lane in self._lanes]
        for index, weighted in enumerate(self._sources):
            marks = [mark for marks in bookmarks if (mark := marks[index]) is not None]
            weighted.source.seek(marks, [indices[index] for indices in running])
        rows = [lane.state.num_rows for lane in self._lanes]
        self._next = rows.index(min(rows))
        logger.info("data: reading on after %d rows of each lane", min(rows))

    def close(self) -> None:
        """Closes files and streams."""
        for weighted in self._sources:
            weighted.source.close()


_CHANGED = {
    "num_lanes": "the global batch was {saved} rows in the checkpoint and is {mine} now; the data "
    "position depends on it: set training.global_batch_size back, or start a new run",
    "seed": "the seed was {saved} in the checkpoint and is {mine} now; the order of documents "
    "depends on it: set debug.seed back, or start a new run",
    "seq_len": "the sequence length was {saved} in the checkpoint and is {mine} now; the data "
    "position depends on it: set training.seq_len back, or start a new run",
    "data_fingerprint": "the documents of [data] are not those of the checkpoint (fingerprint "
    "{saved}, now {mine}): files, their order, columns, shuffle or mixture changed; "
    "set them back, or start a new run",
    "tokenizer_fingerprint": "the tokenizer is not that of the checkpoint (fingerprint {saved}, "
    "now {mine}): set [tokenizer] back, or start a new run",
}
