"""What a reader hands on: a document's text, or why there is none, and where it stands.

A reader never raises for the content of one document. It returns a `BadDocument`, and the policy
`[data] bad_documents` decides in one place, `SkipPolicy`, whether that is counted or ends the run.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from titan_relay.config import ConfigError

logger = logging.getLogger(__name__)

_MAX_WARNINGS = 5
# Epochs of a shuffled source without a good document after which reading on is hopeless.
_SHUFFLED_EPOCHS = 64


class DataError(ConfigError):
    """Data that cannot be trained on; ``str()`` is one line naming key or file, value and fix."""


@dataclass(frozen=True, slots=True)
class Document:
    """Usable text: not empty, and encodable as UTF-8."""

    text: str
    where: str  # file and row, for messages


@dataclass(frozen=True, slots=True)
class BadDocument:
    """A row that cannot be trained on."""

    where: str
    reason: str
    blank_line: bool = False  # ordinary in JSON Lines: ignored, never stops a run


Row = Document | BadDocument


class DocumentFile(Protocol):
    """Random access to the documents of one file (or several that share a format)."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Row: ...


def check_text(value: Any, where: str) -> Row:
    """A `Document` if `value` is text that every tokenizer accepts, else the reason why not."""
    if value is None:
        return BadDocument(where, "the text is null")
    if not isinstance(value, str):
        return BadDocument(where, f"the text is {type(value).__name__}, not a string")
    if not value:
        return BadDocument(where, "the text is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        return BadDocument(
            where, f"lone surrogate U+{code:04X} at character {error.start}: not valid Unicode"
        )
    return Document(value, where)


def check_row(row: Any, text_column: str, where: str) -> Row:
    """`check_text` of one column of a JSON object or table row."""
    if not isinstance(row, dict):
        return BadDocument(where, f"{type(row).__name__} where an object was expected")
    if text_column not in row:
        return BadDocument(where, missing_column(text_column, list(row)))
    return check_text(row[text_column], where)


def missing_column(text_column: str, present: Sequence[Any]) -> str:
    """The sentence for a column that is not there; lists the first twenty that are."""
    names = ", ".join(str(name) for name in present[:20]) or "none"
    return f'no column "{text_column}" (data.text_column); columns present: {names}'


def decode_utf8(raw: bytes, where: str) -> str | BadDocument:
    """`raw` as text, without a byte-order mark; names the first byte that is no UTF-8."""
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        return BadDocument(
            where, f"invalid UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}"
        )


class SkipPolicy:
    """Counts bad documents ("skip") or ends the run at the first one ("stop").

    The first five of each source are logged with file and row, later ones only counted; `counts`
    is per source name and only for this process since it started.
    """

    def __init__(self, bad_documents: str) -> None:
        self._stop = bad_documents == "stop"
        self.counts: Counter[str] = Counter()

    def handle(self, source_name: str, bad: BadDocument) -> None:
        """Raises DataError under "stop"; a blank line of JSON Lines is not a bad document."""
        if bad.blank_line:
            return
        if self._stop:
            raise DataError(
                f'{bad.where}: {bad.reason}; mend it, or set data.bad_documents = "skip"'
            )
        self.counts[source_name] += 1
        count = self.counts[source_name]
        if count <= _MAX_WARNINGS:
            logger.warning("source %s: skipped %s: %s", source_name, bad.where, bad.reason)
        if count == _MAX_WARNINGS:
            logger.warning("source %s: further bad documents are only counted", source_name)


def max_bad_in_a_row(num_documents: int, shuffle: bool) -> int:
    """The number after which further reading is as good as hopeless.

    In file order a lane meets the same documents again after at most `num_documents` of them.
    Shuffled, it meets a random one each time: where only one of n is good, 64 n in a row miss it
    with probability exp(-64).
    """
    return num_documents * (_SHUFFLED_EPOCHS if shuffle else 1)
