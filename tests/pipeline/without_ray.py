"""Jobs on a folder in memory whose rows are made right here: for tests of everything that is written, in any order, in no time."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from engine.errors import RowError
from engine.params import Result
from pipeline import run as run_module
from pipeline.config import load_config
from pipeline.execute import Outcome
from pipeline.generate import ENGINE
from pipeline.parts import Part, list_parts, read_part
from pipeline.run import run_job
from pipeline.schema import make_record, make_table
from pipeline.sources import read_chunk

NUM_ROWS = 12  # of the job

_BAD = (0, 4, 8)
_ENGINE = {"method": "off", "dtype": "float32", "device": "cpu", "max_batch": 1, "threads": 1}


class Killed(Exception):
    """The end of a run that is killed, from whatever it would do to its folder."""


class MemoryFolder:
    """As the folders of `pipeline.folders`, without a lock, as in S3. Several of them may share their files.

    act: called with what is done to which name, and a function that does it; as it is, calls that.
    """

    path = "memory"

    def __init__(self, files: dict[str, bytes] | None = None):
        self.files = {} if files is None else files
        self.act: Callable = lambda what, name, do: do()
        self.opened: list[str] = []

    def create(self, name, data):
        def do():
            if name in self.files:
                raise FileExistsError(name)
            self.files[name] = data

        self.act("create", name, do)

    def replace(self, name, data):
        self.act("replace", name, lambda: self.files.update({name: data}))

    def delete(self, name):
        self.act("delete", name, lambda: self.files.pop(name, None))

    def read(self, name):
        return self.act("read", name, lambda: self._get(name))

    def open(self, name):
        self.opened.append(name)
        return io.BytesIO(self._get(name))

    def names(self, folder):
        return self.act("names", folder, lambda: sorted(name for name in self.files if name.startswith(f"{folder}/")))

    def probe(self):
        pass

    def explain(self, error):
        return str(error)

    @contextlib.contextmanager
    def lock(self):
        yield

    @contextlib.contextmanager
    def log_folder(self):
        yield ""

    def _get(self, name):
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    @property
    def run(self) -> dict:
        return json.loads(self.files["run.json"])

    def rows(self) -> list[int]:
        """Every row_index that is there, in order."""
        return sorted(row for _, row in self.rows_by_run())

    def rows_by_run(self) -> list[tuple[str, int]]:
        """(id of the run that wrote it, row_index) of every row."""
        return [(part.run_id, row) for part in self._parts() for row in part.row_index.tolist()]

    def texts(self) -> dict[int, str | None]:
        """Of every row; None of an error row."""
        return {row: text for part in self._parts() for row, text in zip(part.row_index, part.table["text"].to_pylist(), strict=True)}

    def _parts(self) -> list[Part]:
        folder = MemoryFolder(self.files)  # one in which nothing happens
        return [read_part(folder, name, ["text"]) for name in list_parts(folder).values()]


@dataclass
class MakeRows:
    """In place of `execute`: every row has the same text; one whose prompt is "bad" is an error row.

    most: rows after which it is stopped by `stopped_by`, or just ends. heals: no row is bad. before_row, before_end: called before each
    row, and once there are no more.
    """

    text: str = "new"
    most: int | None = None
    stopped_by: int | None = None
    heals: bool = False
    before_row: Callable[[], object] = lambda: None
    before_end: Callable[[], object] = lambda: None

    def __call__(self, work, take, flush, log_folder) -> Outcome:
        rows = [row for chunk in work.chunks for table in read_chunk(chunk, work.columns) for row in table.to_pylist()]
        for row in rows[: self.most]:
            self.before_row()
            reason = take(make_table([self._make(row)]).replace_schema_metadata({ENGINE: json.dumps(_ENGINE)}))
            if reason is not None:
                return Outcome(self.stopped_by or reason, None)
        self.before_end()
        return Outcome(self.stopped_by, None)

    def _make(self, row) -> dict:
        key = {"id": row["id"], "sample": row["sample"]}
        if row["prompt"] == "bad" and not self.heals:
            result = Result.failed(*key.values(), RowError("bad", "it is"), prompt="bad", seed=0)
        else:
            result = Result(**key, prompt=row["prompt"], token_ids=[1], text=self.text, finish_reason="stop")
        return make_record(result, row_index=row["row_index"], meta=None, worker="w", depth=0)


@pytest.fixture
def run_on(tmp_path, monkeypatch):
    """Runs the job on a folder, with rows from `make`; several at once in threads of their own."""
    records = [{"id": f"r{row}", "prompt": "bad" if row in _BAD else "good"} for row in range(NUM_ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sections = {"input": {"path": str(tmp_path / "in.jsonl")}, "engine": {"kind": "fake"}, "output": {"path": "memory", "rows_per_file": 3}}
    (tmp_path / "job.yaml").write_text(json.dumps(sections))
    own = threading.local()
    monkeypatch.setattr(run_module, "open_folder", lambda path, options: own.folder)
    monkeypatch.setattr(run_module, "execute", lambda *arguments: own.make(*arguments))

    def run(folder: MemoryFolder, *overrides: str, make: Callable[..., Outcome] | None = None) -> int:
        own.folder, own.make = folder, make or MakeRows()
        return run_job(load_config(str(tmp_path / "job.yaml"), overrides))

    return run
