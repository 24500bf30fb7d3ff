"""The parts of an output: `rows/part-00000012.parquet`, numbered in sequence, each made once and whole.

A part's number is what keeps rows from being there twice, on a disk and in an object store alike: a part is created only where there is
none, whoever creates number k has read the keys of all parts below k (see `pipeline.part_writer`), and no number that a job's runs have
come by is free again: a part that has to go is emptied.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.errors import EngineError, UserError
from pipeline.schema import SCHEMA

FOLDER = "rows"

_NAME = re.compile(rf"{FOLDER}/part-(\d{{8,}})\.parquet")
_RUN = b"rheo.run"
_KEYS = ["row_index", "sample", "status"]
_T = TypeVar("_T")

_THREADS = 16  # of an object store, each part's footer and keys are requests of their own


@dataclass(frozen=True)
class Part:
    """What was read of a part. run_id: the run that wrote it. table: the columns of its N rows that resuming needs, and others."""

    name: str
    run_id: str
    table: pa.Table

    @property
    def row_index(self) -> np.ndarray:
        """[N] int64"""
        return self.table["row_index"].to_numpy()

    @property
    def sample(self) -> np.ndarray:
        """[N] int32"""
        return self.table["sample"].to_numpy()

    @property
    def is_error(self) -> np.ndarray:
        """[N] bool"""
        return pc.equal(self.table["status"], "error").to_numpy()


def part_name(number: int) -> str:
    return f"{FOLDER}/part-{number:08}.parquet"


def list_parts(folder) -> dict[int, str]:
    """number -> name, in order. Raises UserError for a Parquet file among them that is no part: a glob would show it."""
    names = [name for name in folder.names(FOLDER) if name.endswith(".parquet")]
    for name in names:
        if not _NAME.fullmatch(name):
            raise UserError(f"'{folder.path}/{name}' is not of rheo; allowed: an output.path whose rows/ holds parts only")
    return dict(sorted((int(_NAME.fullmatch(name)[1]), name) for name in names))


def encode_part(table: pa.Table, run_id: str) -> bytes:
    """The file of a table of `SCHEMA`."""
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({_RUN: run_id}), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def read_part(folder, name: str, columns: Sequence[str] = ()) -> Part:
    """The keys and statuses of a part, and `columns`. Raises EngineError for one that cannot be read or has another schema."""
    return open_part(folder, name, lambda file: Part(name, _run_of(file), file.read(list({*_KEYS, *columns}))))


def read_parts(folder, names: Iterable[str], columns: Sequence[str] = ()) -> Iterator[Part]:
    """As `read_part`, several at a time, and never more than these in memory."""
    names = iter(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        while some := list(itertools.islice(names, _THREADS)):
            yield from pool.map(lambda name: read_part(folder, name, columns), some)


def open_part(folder, name: str, use: Callable[[pq.ParquetFile], _T]) -> _T:
    """What `use` makes of a part. Raises EngineError as `read_part` does."""
    try:
        with folder.open(name) as file, pq.ParquetFile(file) as part:
            if not part.schema_arrow.equals(SCHEMA):
                raise EngineError(f"'{folder.path}/{name}' has another schema than this version of rheo writes")
            return use(part)
    except (pa.ArrowException, OSError) as error:
        raise EngineError(f"'{folder.path}/{name}' cannot be read: {error}") from None


def _run_of(part: pq.ParquetFile) -> str:
    return (part.schema_arrow.metadata or {}).get(_RUN, b"").decode()


def empty_part(folder, name: str, run_id: str) -> None:
    """Takes all rows out of a part of another run. It stays: a writer that has not read what is above may not take its number."""
    folder.replace(name, encode_part(SCHEMA.empty_table(), run_id))


def drop_errors(folder, name: str) -> None:
    """Takes a part's error rows out of it, whole or not at all. One that is left empty stays, as in `empty_part`."""
    table, run_id = open_part(folder, name, lambda file: (file.read(), _run_of(file)))
    folder.replace(name, encode_part(table.filter(pc.not_equal(table["status"], "error")), run_id))
