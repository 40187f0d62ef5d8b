"""Tokenizes ahead on one background thread, without the saved state running ahead too.

Tokenizers release the interpreter lock, so a training step hides the next step's tokenization.
Every row travels with the state its lane had right after it; the state that is saved is that of
the rows handed out, whatever the thread has read meanwhile.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from titan_relay.data.lane import PackedRow
from titan_relay.data.reader import LaneReader, lane_key

_POLL_SECONDS = 0.1

# A row with its lane and that lane's state after it, or what the thread died of.
_Item = tuple[int, PackedRow, bytes] | BaseException


class PrefetchingReader:
    """A `LaneReader` read up to `max_rows_ahead` rows ahead; same rows, same state.

    The thread starts with the first row asked for. An error in it is raised by the call that
    would have returned the row, and by every later one. Not for
    use from several threads. Call `close` when done.
    """

    def __init__(self, reader: LaneReader, max_rows_ahead: int) -> None:
        assert max_rows_ahead > 0
        self.lanes = reader.lanes
        self._reader, self._max_rows_ahead = reader, max_rows_ahead
        self._state = reader.state_dict()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._items: queue.Queue[_Item] = queue.Queue(max_rows_ahead)

    def __iter__(self) -> Iterator[PackedRow]:
        return self

    def __next__(self) -> PackedRow:
        if self._failure is not None:
            raise self._failure
        if self._thread is None:
            self._start()
        item = self._items.get()
        if isinstance(item, BaseException):
            self._halt()
            self._failure = item
            raise item
        lane, row, dumped = item
        self._state[lane_key(lane)] = dumped
        return row

    def next_rows(self, num_rows: int | None = None) -> PackedRow:
        """As `LaneReader.next_rows`."""
        rows = [next(self) for _ in range(num_rows or len(self.lanes))]
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    def state_dict(self) -> dict[str, Any]:
        """As `LaneReader.state_dict`, after the last row that was handed out."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `LaneReader.load_state_dict`; rows read ahead are dropped."""
        self._halt()
        self._reader.load_state_dict(state)
        self._failure = None
        self._state = self._reader.state_dict()

    @property
    def num_skipped(self) -> dict[str, int]:
        """As `LaneReader.num_skipped`; rows read ahead are counted already."""
        return self._reader.num_skipped

    def close(self) -> None:
        """Ends the thread and closes the reader."""
        self._halt()
        self._reader.close()

    def _start(self) -> None:
        self._stop = threading.Event()
        self._items = queue.Queue(self._max_rows_ahead)
        self._thread = threading.Thread(
            target=self._read_ahead, args=(self._stop, self._items), name="data", daemon=True
        )
        self._thread.start()

    def _halt(self) -> None:
        """Stops the thread. What it read ahead is lost, so the reader must be given a state."""
        self._stop.set()
        if self._thread is not None:
            with suppress(queue.Empty):
                while True:  # make room, or it would wait for some at its next row
                    self._items.get_nowait()
            self._thread.join()
            self._thread = None

    def _read_ahead(self, stop: threading.Event, items: "queue.Queue[_Item]") -> None:
        while not stop.is_set():
            item: _Item
            try:
                lane, row = self._reader.next_of_lane()
                item = lane, row, self._reader.dump_lane(lane)
            except BaseException as error:  # handed to the caller of __next__
                item = error
            while not stop.is_set():
                try:
                    items.put(item, timeout=_POLL_SECONDS)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
