"""Jobs on the fake engine, run through a real local Ray that all tests share."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.config import JobConfig, load_config


def write_jsonl(path: Path, records: list) -> Path:
    """One line per record; a string or bytes is a line as it is."""
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_rows(output: Path) -> list[dict]:
    """All rows in input order."""
    rows = [row for part in sorted((output / "rows").glob("*.parquet")) for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: (row["row_index"], row["sample"]))


@pytest.fixture
def make_config(tmp_path):
    """A fake job over `source`, into tmp_path/out, with options over it."""

    def make(source: Path, *overrides: str) -> JobConfig:
        job = tmp_path / "job.yaml"
        job.write_text(f"input: {{path: '{source}'}}\nengine: {{kind: fake}}\noutput: {{path: '{tmp_path / 'out'}'}}\n")
        return load_config(str(job), overrides)

    return make


@pytest.fixture(scope="session")
def ray_session():
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
