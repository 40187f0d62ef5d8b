"""What a reader hands on: a document's text, or why there is none, and where it stands.

A reader never raises for the content of one document. It returns a `BadDocument`, and the policy
`[data] bad_documents` decides in one place whether that is counted or ends the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
