"""What an output may never show, whoever looks and whenever; and what it must hold at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.schema import SCHEMA

Key = tuple[str, int]  # id, sample

#: what must be as in an undisturbed run
COMPARED = ("status", "token_ids", "text", "finish_reason")


class BrokenPart(Exception):
    """A file in the glob that is no whole part."""


def read_table(name: str, data: bytes) -> pa.Table:
    """Raises BrokenPart."""
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise BrokenPart(f"{name} ({len(data)} bytes) cannot be read: {error}") from None
    if not table.schema.equals(SCHEMA):
        raise BrokenPart(f"{name} has another schema")
    return table


def keys_of(table: pa.Table) -> list[Key]:
    return list(zip(table["id"].to_pylist(), table["sample"].to_pylist(), strict=True))


def find_doubled(parts: Mapping[str, Iterable[Key]]) -> list[str]:
    """The keys that are there twice, each with its parts."""
    places: dict[Key, list[str]] = {}
    for name, keys in parts.items():
        for key in keys:
            places.setdefault(key, []).append(name)
    return [f"{key} in {', '.join(names)}" for key, names in places.items() if len(names) > 1]


@dataclass(frozen=True)
class Verdict:
    """Keys of rows."""

    lost: list[Key]
    doubled: list[Key]
    unequal: list[Key]
    foreign: list[Key]  # that the reference has not

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.doubled or self.unequal or self.foreign)


def values_of(table: pa.Table) -> dict[Key, tuple]:
    """key -> its values of `COMPARED`."""
    values = zip(*(table[name].to_pylist() for name in COMPARED), strict=True)
    return dict(zip(keys_of(table), values, strict=True))


def compare(rows: pa.Table, reference: Mapping[Key, tuple]) -> Verdict:
    """rows: all that are there. reference: as from `values_of`."""
    counts = Counter(keys_of(rows))
    values = values_of(rows)
    return Verdict(
        lost=[key for key in reference if key not in counts],
        doubled=[key for key, times in counts.items() if times > 1],
        unequal=[key for key, value in values.items() if key in reference and reference[key] != value],
        foreign=[key for key in counts if key not in reference],
    )
