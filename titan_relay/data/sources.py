"""Sources: endless (or single-epoch) runs of documents, each found by its running index.

The running index counts documents over all epochs: document `k` is the one at position
``k mod n`` of epoch ``k div n``'s order. Lanes own running indices (`lane.py`), so which rank
reads a document never depends on how many ranks there are.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from titan_relay.config import Origins
from titan_relay.config.schema_data import DataConfig, MixtureEntry
from titan_relay.data.check import check_documents
from titan_relay.data.documents import Row, max_bad_in_a_row
from titan_relay.data.hub_stream import STREAM_SIZES, HubStream, StreamSizes
from titan_relay.data.local_files import LocalDocuments
from titan_relay.data.order import SeededPermutation

logger = logging.getLogger(__name__)

Bookmark = Sequence[int]


class Source(Protocol):
    """What a lane reads from."""

    name: str
    fingerprint: str
    infinite: bool

    @property
    def max_bad_in_a_row(self) -> int | None:
        """Bad documents after which a lane may give up; None while that cannot be told."""

    def read(self, running_index: int) -> Row | None:
        """The document, or None after the last one of a finite source."""

    def bookmark(self, running_index: int) -> Bookmark | None:
        """Where to reopen a stream to read `running_index` again; None: any place is free."""

    def seek(self, bookmarks: Sequence[Bookmark], running_indices: Sequence[int]) -> None:
        """Prepares to read on from the given indices, one for each owned lane."""

    def close(self) -> None: ...


class LocalSource:
    """Local files in an order drawn from (seed, epoch), or in file order."""

    def __init__(
        self, name: str, documents: LocalDocuments, *, seed: int, shuffle: bool, infinite: bool
    ) -> None:
        self.name, self.fingerprint = name, documents.fingerprint
        self._documents, self._seed, self._num_documents = documents, seed, len(documents)
        self._shuffle, self.infinite = shuffle, infinite
        self._last_epoch = 0
        self._orders: dict[int, SeededPermutation] = {}

    @property
    def max_bad_in_a_row(self) -> int:
        return max_bad_in_a_row(self._num_documents, self._shuffle)

    def read(self, running_index: int) -> Row | None:
        epoch, position = divmod(running_index, self._num_documents)
        if epoch > 0 and not self.infinite:
            return None
        if epoch > self._last_epoch:
            self._last_epoch = epoch
            if epoch & (epoch - 1) == 0:  # a tiny corpus has thousands of epochs
                logger.info("source %s: epoch %d begins", self.name, epoch + 1)
        return self._documents.read(self._order(epoch)[position] if self._shuffle else position)

    def _order(self, epoch: int) -> SeededPermutation:
        if epoch not in self._orders:
            if len(self._orders) > 8:  # lanes are at most a few epochs apart
                self._orders.clear()
            key = f"{self._seed}/{self.name}/{epoch}"
            self._orders[epoch] = SeededPermutation(self._num_documents, key)
        return self._orders[epoch]

    def bookmark(self, running_index: int) -> Bookmark | None:
        return None

    def seek(self, bookmarks: Sequence[Bookmark], running_indices: Sequence[int]) -> None:
        self._last_epoch = max(running_indices) // self._num_documents

    def close(self) -> None:
        self._documents.close()


@dataclass(frozen=True)
class WeightedSource:
    """A source and its share of the tokens (shares sum to 1)."""

    source: Source
    share: float


def build_sources(
    config: DataConfig,
    *,
    seed: int,
    num_lanes: int,
    lanes: range,
    num_tokens: Callable[[str], int],
    stream_sizes: StreamSizes = STREAM_SIZES,
) -> list[WeightedSource]:
    """Opens the sources of a `[data]` section, in the order of its mixture.

    Args:
        num_tokens: how many tokens a text has, to find out whether a source is usable at all.

    Raises:
        ConfigError: no or several kinds of source named.
        DataError: files missing, nothing usable in them.
    """
    Origins("the reader").refuse(config, check_documents("data", config))
    entries = _entries(config)
    total = sum(entry.weight for entry in entries)
    result = []
    for entry in entries:
        source: Source
        if entry.files:
            key = f'data.mixture "{entry.name}" files' if config.mixture else "data.files"
            documents = LocalDocuments(entry.name, entry.files, entry.text_column, key)
            documents.require_usable(num_tokens)
            source = LocalSource(
                entry.name, documents, seed=seed, shuffle=config.shuffle, infinite=config.infinite
            )
        else:
            source = HubStream(
                entry,
                seed=seed,
                shuffle=config.shuffle,
                infinite=config.infinite,
                num_lanes=num_lanes,
                lanes=lanes,
                sizes=stream_sizes,
            )
        result.append(WeightedSource(source, entry.weight / total))
    return result


def _entries(config: DataConfig) -> list[MixtureEntry]:
    """The mixture's entries; a single source is a mixture of one, called "data"."""
    return list(config.mixture) or [
        MixtureEntry(
            name="data",
            weight=1.0,
            dataset=config.dataset,
            subset=config.subset,
            split=config.split,
            files=config.files,
            text_column=config.text_column,
        )
    ]
