"""Writes parts: whole and durable in a staging folder, then renamed into OUT/rows, so that a glob of it never sees half a file."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq
from ray.data import Datasink
from ray.data._internal.execution.interfaces import TaskContext
from ray.data.block import Block, BlockAccessor

from engine.errors import EngineError
from pipeline.schema import SCHEMA


class PartSink(Datasink[int]):
    """A part's name depends on the run and on the write task only: a task that Ray runs again replaces its own part.

    As the first part comes in, `earlier`, the folder of the rows that it replaces, is dropped: at once, or not at all.
    Workers never make the staging folder: once it is gone, a writer that outlived its run can write nothing.
    """

    def __init__(self, *, staging: str, rows: str, earlier: str, run_id: str, rows_per_file: int):
        self._staging = staging
        self._rows = rows
        self._earlier = earlier
        self._run_id = run_id
        self._rows_per_file = rows_per_file

    @property
    def min_rows_per_write(self) -> int:
        return self._rows_per_file

    def write(self, blocks: Iterable[Block], ctx: TaskContext) -> int:
        """Returns the number of rows written. Raises EngineError for a disk that does not take them."""
        tables = [BlockAccessor.for_block(block).to_arrow() for block in blocks]
        tables = [table.select(SCHEMA.names).cast(SCHEMA) for table in tables if table.num_rows]
        if not tables:
            return 0
        table = pa.concat_tables(tables)
        name = f"part-{self._run_id}-{ctx.task_idx:06}.parquet"
        try:
            self._commit(table, os.path.join(self._staging, name), os.path.join(self._rows, name))
        except OSError as error:
            raise EngineError(f"'{os.path.join(self._rows, name)}' cannot be written: {error}") from None
        return table.num_rows

    def _commit(self, table: pa.Table, staged: str, final: str) -> None:
        with open(staged, "wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        self._drop_earlier()
        os.rename(staged, final)
        _sync_folder(self._rows)

    def _drop_earlier(self) -> None:
        dropped = os.path.join(self._staging, "earlier")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._earlier, dropped)
            shutil.rmtree(dropped, ignore_errors=True)


def _sync_folder(path: str) -> None:
    """Makes a rename durable: the entry lives in the folder, not in the file."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
