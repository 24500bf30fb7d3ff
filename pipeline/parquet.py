"""Parquet: one row group is one range for the readers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import RowError, UserError

SUFFIXES = (".parquet",)

_BATCH_ROWS = 256

#: column chunks are read in pieces: whole ones may be as large as the file
_OPTIONS = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}

#: what Arrow raises for a value that Python cannot hold: text that is not UTF-8, a time out of range, an unknown time zone
_NO_PYTHON_VALUE = (pa.ArrowException, ValueError, OverflowError, LookupError)


def read_columns(path: str) -> list[str]:
    """The columns. Raises UserError for a file that is not Parquet."""
    with _open(path) as file:
        return file.schema_arrow.names


def read_records(path: str, *, offset: int = 0, first: int = 1) -> Iterator[tuple[int, int, dict | RowError]]:
    """(row, row group, record); see `pipeline.formats`. Raises UserError for a file that is not Parquet, or is damaged."""
    number = first
    with _open(path) as file:
        for group in range(offset, file.num_row_groups):
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group]):
                for record in _to_records(_with_times_as_text(batch)):
                    yield number, group, record
                    number += 1


def _to_records(batch: pa.RecordBatch) -> list[dict | RowError]:
    try:
        return batch.to_pylist()
    except _NO_PYTHON_VALUE:
        return [_to_record(batch, row) for row in range(batch.num_rows)]


def _to_record(batch: pa.RecordBatch, row: int) -> dict | RowError:
    record = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            record[name] = column[row].as_py()
        except _NO_PYTHON_VALUE as error:
            return RowError("bad_record", f"{name} cannot be read: {error}")
    return record


def _with_times_as_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Nanosecond times have no Python type."""
    columns = [
        column.cast(pa.string()) if getattr(column.type, "unit", None) == "ns" and not pa.types.is_duration(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


@contextmanager
def _open(path: str) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, **_OPTIONS) as file:
            yield file
    except pa.ArrowException as error:
        raise UserError(f"input file '{path}' is not readable Parquet: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise UserError(f"input file '{path}' cannot be read: {error.strerror or error}") from None
