"""Parquet input: one row group is one range for the readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import UserError

SUFFIXES = (".parquet",)

_BATCH_ROWS = 256


def read_layout(path: str) -> tuple[list[str], list[int]]:
    """The columns of a file and the rows of its row groups; raises UserError for a file that is not Parquet."""
    with _open(path) as file:
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        return file.schema_arrow.names, rows


def read_rows(path: str, *, group: int, columns: Sequence[str] | None = None) -> Iterator[dict]:
    """The rows of a row group, with only `columns` where given."""
    with _open(path) as file:
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
            yield from _to_python(pa.Table.from_batches([batch])).to_pylist()


def _to_python(table: pa.Table) -> pa.Table:
    """Nanosecond times have no Python type: they become text."""
    for index, field in enumerate(table.schema):
        if getattr(field.type, "unit", None) == "ns":
            table = table.set_column(index, field.name, table.column(index).cast(pa.string()))
    return table


@contextmanager
def _open(path: str) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except pa.ArrowException as error:
        raise UserError(f"input file '{path}' is not readable Parquet: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise UserError(f"input file '{path}' cannot be read: {error.strerror or error}") from None
