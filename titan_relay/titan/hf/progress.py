"""A long conversion's progress (how far, how fast, how long still), and its journal, which lets the
next process go on where a killed one stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_relay.titan.hf.errors import HfError
from titan_relay.units import GIB, duration_in_words, in_gib

_SECONDS_BETWEEN_LINES = 2.0


OnDone = Callable[[str], None]


def ignore(name: str) -> None:
    """Does nothing with the name of what is done."""


class Progress:
    """Prints a line every two seconds, and one at the end; tells `on_done` of all that is done."""

    def __init__(
        self, label: str, num_items: int, num_bytes: int, on_done: OnDone = ignore
    ) -> None:
        self._on_done = on_done
        self._label, self._num_items, self._num_bytes = label, num_items, num_bytes
        self._items = self._bytes = self._bytes_before = 0
        self._start = self._last = time.monotonic()

    def skip(self, num_items: int, num_bytes: int) -> None:
        """Count what an earlier process did, which says nothing of this one's speed."""
        self._items += num_items
        self._bytes += num_bytes
        self._bytes_before += num_bytes

    def advance(self, name: str, num_bytes: int, num_items: int = 1) -> None:
        """Count items that are finished; `name` is that of the first."""
        self._on_done(name)
        self._items += num_items
        self._bytes += num_bytes
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LINES and self._items < self._num_items:
            return
        self._last = now
        speed = max(1.0, (self._bytes - self._bytes_before) / max(1e-9, now - self._start))
        left = (self._num_bytes - self._bytes) / speed
        print(
            f"{self._label}: {self._items} of {self._num_items} tensors, "
            f"{self._bytes / GIB:.2f} of {in_gib(self._num_bytes)}, "
            f"{speed / 1e6:.0f} MB/s, {duration_in_words(left)} left ({name})",
            flush=True,
        )


class Journal:
    """A file of finished items, one a line after a first line that says what is being done."""

    def __init__(self, path: Path, work: Any) -> None:
        """Open or start the journal.

        Args:
            work: what is done, as JSON; finished items of other work are refused.

        Raises:
            HfError: the file is of other work.
        """
        self._path = path
        self.done: dict[str, Any] = {}
        head = json.dumps({"work": work}, sort_keys=True)
        if path.is_file():
            lines = path.read_text(encoding="utf-8").split("\n")
            if lines[0] != head and len(lines) > 1:
                raise HfError(
                    f"{path.parent} holds an unfinished conversion of something else, or of files "
                    "that have changed since; delete it, or name another folder"
                )
            # The last line may be torn: the process was killed while it wrote it.
            for line in lines[1:-1]:
                item = json.loads(line)
                self.done[item["item"]] = item["value"]
            kept = [head, *(self._line(name, value) for name, value in self.done.items())]
        else:
            kept = [head]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    @staticmethod
    def _line(name: str, value: Any) -> str:
        return json.dumps({"item": name, "value": value})

    def add(self, name: str, value: Any = None) -> None:
        """Note that an item is finished."""
        self.done[name] = value
        with self._path.open("a", encoding="utf-8") as file:
            file.write(self._line(name, value) + "\n")

    def remove(self) -> None:
        """Delete the file: the work is done."""
        self._path.unlink()
