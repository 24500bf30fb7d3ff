"""Jobs on the fake engine, run through a real local Ray that all tests share."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine.params import SamplingParams
from pipeline.columns import Columns
from pipeline.config import InputSection, JobConfig, load_config
from pipeline.files import find_files
from pipeline.sources import read_chunk, scan_input
from tests.pipeline.without_ray import run_on  # noqa: F401, a fixture
from tests.s3 import s3_bucket, s3_credentials, s3_server  # noqa: F401, fixtures


def write_jsonl(path: Path, records: list) -> Path:
    """One line per record; a string or bytes is a line as it is."""
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_rows(output: Path) -> list[dict]:
    """All rows in input order."""
    rows = [row for part in sorted((output / "rows").glob("*.parquet")) for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: (row["row_index"], row["sample"]))


def read_input(path, num_samples=1, format="auto", **section):
    """The plan, and the rows that its chunks give, without Ray."""
    path = [str(entry) for entry in path] if isinstance(path, list) else str(path)
    columns = Columns(InputSection(path=path, **section), SamplingParams(), num_samples)
    plan = scan_input(find_files(path, format)[0], columns)
    rows = [row for chunk in plan.chunks for table in read_chunk(chunk, columns) for row in table.to_pylist()]
    assert len(rows) == plan.num_rows
    assert sorted({row["row_index"] for row in rows}) == list(range(plan.num_records))
    return plan, rows


@pytest.fixture
def make_config(tmp_path):
    """A fake job over `source`, into tmp_path/out, with options over it."""

    def make(source: Path | list[str], *overrides: str) -> JobConfig:
        job = tmp_path / "job.yaml"
        sections = {"input": {"path": source}, "engine": {"kind": "fake"}, "output": {"path": tmp_path / "out"}}
        job.write_text(json.dumps(sections, default=str))  # JSON is YAML
        return load_config(str(job), overrides)

    return make


@pytest.fixture(scope="session")
def ray_session(s3_credentials):  # noqa: F811
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def run_fake(tmp_path, make_config, ray_session):
    """Runs records as a fake job; returns (exit code, rows in input order)."""
    from pipeline.run import run_job

    def run(records: list, *overrides: str) -> tuple[int, list[dict]]:
        source = write_jsonl(tmp_path / "in.jsonl", records)
        code = run_job(make_config(source, *overrides))
        return code, read_rows(tmp_path / "out")

    return run
