"""The parts of an output: `rows/part-00000012.parquet`, numbered in sequence, each made once and whole.

A part's number is what keeps rows from being there twice, on a disk and in an object store alike: a part is created only where there is
none, and whoever creates number k has read the keys of all parts below k (see `pipeline.commit`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
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
    """What resuming needs of a part. run_id: the run that wrote it. row_index, sample, is_error: [N], of its rows."""

    name: str
    run_id: str
    row_index: np.ndarray
    sample: np.ndarray
    is_error: np.ndarray


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


def read_part(folder, name: str) -> Part:
    """Raises EngineError for a part that cannot be read or has another schema."""

    def read(file: pq.ParquetFile) -> Part:
        keys = file.read(_KEYS)
        is_error = pc.equal(keys["status"], "error").to_numpy()
        return Part(name, run_of(file), keys["row_index"].to_numpy(), keys["sample"].to_numpy(), is_error)

    return open_part(folder, name, read)


def read_parts(folder, names: Iterable[str]) -> Iterator[Part]:
    """As `read_part`, several at a time, and never more than these in memory."""
    names = iter(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        while some := list(itertools.islice(names, _THREADS)):
            yield from pool.map(lambda name: read_part(folder, name), some)


def open_part(folder, name: str, use: Callable[[pq.ParquetFile], _T]) -> _T:
    """What `use` makes of a part. Raises EngineError as `read_part` does."""
    try:
        with folder.open(name) as file, pq.ParquetFile(file) as part:
            if not part.schema_arrow.equals(SCHEMA):
                raise EngineError(f"'{folder.path}/{name}' has another schema than this version of rheo writes")
            return use(part)
    except (pa.ArrowException, OSError) as error:
        raise EngineError(f"'{folder.path}/{name}' cannot be read: {error}") from None


def run_of(part: pq.ParquetFile) -> str:
    """The id of the run that wrote a part."""
    return (part.schema_arrow.metadata or {}).get(_RUN, b"").decode()


def drop_errors(folder, name: str) -> None:
    """Takes a part's error rows out of it, whole or not at all. One that is left empty stays: its number must not be free again."""
    table, run_id = open_part(folder, name, lambda file: (file.read(), run_of(file)))
    folder.replace(name, encode_part(table.filter(pc.not_equal(table["status"], "error")), run_id))
