"""The formats of input files, one module each, all with the same three names:

SUFFIXES: of file names, in lower case.
read_columns(file): the columns, where a file names them before its records; None where it does not.
read_records(file, offset=0, first=1): yields (number, offset, record) in order. A record is a map from column to value, or the RowError
    that says what is wrong with it. number: its line, or its row in Parquet, from 1; `first` is the first one's. offset: where a later
    call may begin with the first record that has it: a byte of a plain text file, a row group of Parquet.

Both functions take an `InputFile` and raise UserError for one that is not of the format at all, or cannot be read.
"""

from __future__ import annotations

from pipeline import csvfile, jsonl, parquet, text

READERS = {"jsonl": jsonl, "parquet": parquet, "csv": csvfile, "text": text}


def suffixes(format: str) -> tuple[str, ...]:
    """Of the files that `input.format` reads in a folder."""
    readers = READERS.values() if format == "auto" else [READERS[format]]
    return tuple(suffix for reader in readers for suffix in reader.SUFFIXES)


def format_of(path: str, format: str) -> str | None:
    """The format that a file's name stands for, if `input.format` allows it."""
    for name, reader in READERS.items():
        if path.lower().endswith(reader.SUFFIXES) and format in ("auto", name):
            return name
    return None
