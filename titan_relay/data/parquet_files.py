"""Parquet files as memory-mapped rows.

Parquet is compressed in blocks of many thousand rows, so that reading one row costs a block.
`datasets` therefore writes the text column once into an Arrow file in its cache (about the size
of the text; all ranks of a machine wait for the one that writes), and every row is then a
memory-mapped slice.
"""

from pathlib import Path
from typing import Any

import numpy as np

from titan_relay.data.documents import BadDocument, DataError, Row, check_text, missing_column


class ParquetFiles:
    """The rows of several Parquet files that share a string column, in the order given.

    Raises DataError naming the file that is no Parquet, lacks the column, or holds another type
    in it: here the whole file is unusable, so `bad_documents` does not apply.
    """

    def __init__(self, paths: list[Path], text_column: str) -> None:
        self._paths, self._column = paths, text_column
        num_rows = [_check_schema(path, text_column) for path in paths]
        self._ends = np.cumsum(num_rows)
        self._rows = self._open() if self._ends[-1] else None

    def _open(self) -> Any:
        from datasets import load_dataset
        from datasets.exceptions import DatasetGenerationError

        files = [str(path) for path in self._paths]
        try:
            rows = load_dataset("parquet", data_files=files, split="train", columns=[self._column])
        except (DatasetGenerationError, OSError, ValueError) as error:
            cause = error.__cause__ or error
            raise DataError(f"data.files: cannot read {', '.join(files)}: {cause}") from error
        assert len(rows) == self._ends[-1]
        return rows

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Row:
        file = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[file - 1]) if file else 0
        where = f"{self._paths[file]}, row {index - first + 1}"
        assert self._rows is not None
        try:
            value = self._rows[index][self._column]
        except UnicodeDecodeError as error:
            return BadDocument(where, f"invalid UTF-8 at offset {error.start}")
        return check_text(value, where)


def _check_schema(path: Path, text_column: str) -> int:
    """Number of rows of a usable file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    with file:
        schema = file.schema_arrow
        if text_column not in schema.names:
            raise DataError(f"{path}: {missing_column(text_column, schema.names)}")
        kind = schema.field(text_column).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(
                f'{path}: column "{text_column}" (data.text_column) holds {kind}, not strings'
            )
        return file.metadata.num_rows
