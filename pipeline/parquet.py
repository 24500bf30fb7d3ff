"""Parquet: one row group is one range for the readers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.errors import RowError, UserError
from pipeline.input_file import InputFile

SUFFIXES = (".parquet",)

_BATCH_ROWS = 256
_BATCH_BYTES = 8 << 20  # unpacked, by the average row of the group

#: column chunks are read in pieces: whole ones may be as large as the file
_OPTIONS = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}

#: what Arrow raises for a value that Python cannot hold: text that is not UTF-8, a time out of range, an unknown time zone
_NO_PYTHON_VALUE = (pa.ArrowException, ValueError, OverflowError, LookupError)


def read_columns(file: InputFile) -> list[str]:
    """The columns. Raises UserError for a file that is not Parquet."""
    with _open(file) as parquet:
        return parquet.schema_arrow.names


def read_records(file: InputFile, *, offset: int = 0, first: int = 1) -> Iterator[tuple[int, int, dict | RowError]]:
    """(row, row group, record); see `pipeline.formats`. Raises UserError for a file that is not Parquet, or is damaged."""
    number = first
    with _open(file) as parquet:
        for group in range(offset, parquet.num_row_groups):
            meta = parquet.metadata.row_group(group)
            num_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * meta.num_rows // max(1, meta.total_byte_size)))
            for batch in parquet.iter_batches(num_rows, row_groups=[group]):
                for record in _to_records(batch):
                    yield number, group, record
                    number += 1


def _to_records(batch: pa.RecordBatch) -> list[dict | RowError]:
    try:
        columns = [_with_times_as_text(column) for column in batch.columns]
        return pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()
    except _NO_PYTHON_VALUE:
        return [_to_record(batch, row) for row in range(batch.num_rows)]


def _to_record(batch: pa.RecordBatch, row: int) -> dict | RowError:
    record = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            cell = column.slice(row, 1)
            record[name] = _with_times_as_text(cell)[0].as_py() if cell[0].is_valid else None
        except _NO_PYTHON_VALUE as error:
            return RowError("bad_record", f"{name} cannot be read: {error}")
    return record


def _with_times_as_text(column: pa.Array) -> pa.Array:
    """Nanoseconds have no Python type."""
    if getattr(column.type, "unit", None) != "ns":
        return column
    if pa.types.is_duration(column.type):
        return pc.binary_join_element_wise(column.cast(pa.int64()).cast(pa.string()), "ns", " ")
    return column.cast(pa.string())


@contextmanager
def _open(file: InputFile) -> Iterator[pq.ParquetFile]:
    try:
        with file.open() as source, pq.ParquetFile(source, **_OPTIONS) as parquet:
            yield parquet
    except pa.ArrowException as error:
        raise UserError(f"input file '{file.path}' is not readable Parquet: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise UserError(f"input file '{file.path}' cannot be read: {error.strerror or error}") from None
