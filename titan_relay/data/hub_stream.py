"""A `datasets` hub dataset as a stream of documents that resumes exactly.

Order: the shards of the dataset in an order drawn from (seed, epoch); within a shard, windows of
2048 documents (`StreamSizes`), each shuffled by itself. Unlike the shuffle buffer of `datasets`,
whose content is lost on resume, a window is a function of its place, so a place
(`[first running index, epoch, shard, offset in the shard]`, a bookmark) is all there is to save.

Cost: every rank streams the whole dataset and keeps only its own lanes' documents, since which
lane a document belongs to is known only by counting. Reopening a bookmark reads and drops the
documents before it in one shard. Documents wait in memory until their lane needs them; lanes
advance at nearly the same pace, so that is a few windows, more while one lane reads a very long
document.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from titan_relay.config.schema_data import MixtureEntry
from titan_relay.data.documents import (
    BadDocument,
    DataError,
    Document,
    Row,
    check_row,
    max_bad_in_a_row,
    missing_column,
)
from titan_relay.data.order import SeededPermutation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamSizes:
    """How much is read.

    window: documents that are shuffled together. max_bad_at_start: a dataset whose first documents
    are all bad, as many as that, has the wrong text_column, not bad luck.
    """

    window: int = 2048
    max_bad_at_start: int = 10_000


STREAM_SIZES = StreamSizes()


class HubStream:
    """See the module. Implements `sources.Source` for the given lanes of `num_lanes`."""

    _examples: Iterator[tuple[int, Any]]

    def __init__(
        self,
        entry: MixtureEntry,
        *,
        seed: int,
        shuffle: bool,
        infinite: bool,
        num_lanes: int,
        lanes: range,
        sizes: StreamSizes = STREAM_SIZES,
    ) -> None:
        self.name = entry.name
        self._sizes = sizes
        self._entry, self._seed = entry, seed
        self._shuffle, self.infinite = shuffle, infinite
        self._num_lanes, self._lanes = num_lanes, lanes
        self._dataset = _open(entry)
        self._num_shards: int = self._dataset.num_shards
        self.fingerprint = "/".join(
            [entry.dataset, entry.subset, entry.split, entry.text_column, str(self._num_shards)]
        )
        self._num_documents: int | None = None
        self._first_bad: BadDocument | None = None
        self._any_usable = False
        self._rewind([0, 0, 0, 0])
        self._wanted = {lane: lane for lane in lanes}
        logger.info("source %s: streaming %s, %d shards", self.name, self._title, self._num_shards)

    @property
    def _title(self) -> str:
        subset = f" {self._entry.subset}" if self._entry.subset else ""
        return f"{self._entry.dataset}{subset} ({self._entry.split})"

    @property
    def num_waiting(self) -> int:
        """Documents that wait for their lane, and places in the stream that are kept for a seek."""
        return len(self._held) + len(self._bookmarks)

    @property
    def max_bad_in_a_row(self) -> int | None:
        if self._num_documents is None:
            return None
        return max_bad_in_a_row(self._num_documents, self._shuffle)

    def read(self, running_index: int) -> Row | None:
        self._wanted[running_index % self._num_lanes] = running_index
        while running_index >= self._next_index:
            if not self._read_window():
                return None
        return self._held.pop(running_index)

    def bookmark(self, running_index: int) -> Sequence[int] | None:
        """The last window that begins at or before `running_index`."""
        return next(mark for mark in reversed(self._bookmarks) if mark[0] <= running_index)

    def seek(self, bookmarks: Sequence[Sequence[int]], running_indices: Sequence[int]) -> None:
        self._any_usable = True  # training got this far
        first = min(mark[0] for mark in bookmarks)
        self._rewind(next(list(mark) for mark in bookmarks if mark[0] == first))
        self._wanted = {index % self._num_lanes: index for index in running_indices}
        logger.info("source %s: reading on from document %d", self.name, self._next_index)

    def close(self) -> None:
        self._examples = iter(())

    def _rewind(self, bookmark: list[int]) -> None:
        self._next_index, self._epoch, self._shard, self._offset = bookmark
        self._epoch_start = self._next_index if bookmark[2:] == [0, 0] else None
        self._held: dict[int, Row] = {}
        self._bookmarks: deque[list[int]] = deque([bookmark])
        self._examples = self._open_shard(self._offset)

    def _open_shard(self, skip: int) -> Iterator[tuple[int, Any]]:
        """(offset, row) of the current shard's documents from `skip` on."""
        if self._shard >= self._num_shards:
            return iter(())
        order = self._order(f"{self._epoch}/shards", self._num_shards)
        shard = self._dataset.shard(num_shards=self._num_shards, index=order[self._shard])
        return enumerate(iter(shard.skip(skip)), start=skip)

    def _order(self, key: str, num_items: int) -> SeededPermutation | range:
        if not self._shuffle:
            return range(num_items)
        return SeededPermutation(num_items, f"{self._seed}/{self.name}/{key}")

    def _read_window(self) -> bool:
        """Reads the next window into `_held`; False at the end of a finite stream."""
        start, bookmark = self._next_index, self._place()
        while not (rows := self._next_rows()):
            self._shard += 1
            if self._shard >= self._num_shards and not self._next_epoch():
                return False
            self._offset = 0
            self._examples = self._open_shard(0)
            bookmark = self._place()
        self._bookmarks.append(bookmark)
        self._forget_old_bookmarks()
        order = self._order(f"{self._epoch}/{start}", len(rows))
        for position in range(len(rows)):
            self._keep(start + position, *rows[order[position]])
        self._next_index += len(rows)
        if not self._any_usable and self._next_index >= self._sizes.max_bad_at_start:
            self._raise_unusable()
        return True

    def _place(self) -> list[int]:
        return [self._next_index, self._epoch, self._shard, self._offset]

    def _next_rows(self) -> list[tuple[int, Any]]:
        try:
            rows: list[tuple[int, Any]] = list(islice(self._examples, self._sizes.window))
        except Exception as error:  # whatever the hub's readers raise for broken files or network
            raise DataError(
                f"source {self.name}: cannot read {self._title}, shard {self._shard}, "
                f"after document {self._offset}: {error}"
            ) from error
        self._offset += len(rows)
        return rows

    def _next_epoch(self) -> bool:
        """Begins the next epoch, unless the source is finite."""
        if not self._any_usable and self._epoch == 0:
            self._raise_unusable()
        if self._epoch_start is not None:
            self._num_documents = self._next_index - self._epoch_start
        if not self.infinite:
            self._shard = self._num_shards
            return False
        self._epoch, self._shard, self._epoch_start = self._epoch + 1, 0, self._next_index
        logger.info("source %s: epoch %d begins", self.name, self._epoch + 1)
        return True

    def _keep(self, running_index: int, offset: int, row: Any) -> None:
        owned = running_index % self._num_lanes in self._lanes
        if not owned and self._any_usable:
            return
        where = f"{self._title}, shard {self._shard}, document {offset + 1}"
        checked = check_row(row, self._entry.text_column, where)
        if isinstance(checked, Document):
            self._any_usable = True
        elif self._first_bad is None:
            self._first_bad = checked
        if owned:
            self._held[running_index] = checked

    def _forget_old_bookmarks(self) -> None:
        oldest = min(self._wanted.values(), default=self._next_index)
        while len(self._bookmarks) > 1 and self._bookmarks[1][0] <= oldest:
            self._bookmarks.popleft()

    def _raise_unusable(self) -> None:
        first = self._first_bad
        detail = f"; the first: {first.where}: {first.reason}" if first else ""
        raise DataError(
            f"source {self.name}: none of the first {self._next_index} documents of {self._title} "
            f"is usable{detail}"
        )


def _open(entry: MixtureEntry) -> Any:
    from datasets import load_dataset

    try:
        dataset = load_dataset(
            entry.dataset, entry.subset or None, split=entry.split, streaming=True
        )
    except Exception as error:  # not found, no network, bad split or subset: many types
        raise DataError(
            f'data.dataset = "{entry.dataset}" (subset "{entry.subset}", split "{entry.split}") '
            f"cannot be opened: {error}"
        ) from error
    columns = dataset.column_names
    if columns is not None:
        if entry.text_column not in columns:
            raise DataError(f"{entry.dataset}: {missing_column(entry.text_column, columns)}")
        dataset = dataset.select_columns([entry.text_column])
    return dataset
