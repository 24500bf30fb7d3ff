"""The command `rheo` with all its subcommands: those of the pipeline, and the jobs that have code of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import JobFile, Overrides, app, main

__all__ = ["main"]  # of pyproject.toml

Tune = Annotated[Path | None, typer.Option(metavar="JOB.yaml", help="Find the best speculation and write it into this job file.")]


@app.command("train-draft")
def train_draft(job: JobFile, overrides: Overrides = None) -> None:
    """Train an EAGLE-3 draft for a target on its own answers, or go on with it: OUT/draft is the result."""
    from jobs.train_draft.config import load_train_config
    from jobs.train_draft.run import train_draft

    raise typer.Exit(train_draft(load_train_config(job, overrides or [])))


@app.command()
def bench(
    job: JobFile,
    overrides: Overrides = None,
    tune: Tune = None,
) -> None:
    """Measure speed over a grid of cells, and other engines beside it, or go on with it: a table, OUT/bench.json, Parquet and plots."""
    from jobs.throughput.config import load_bench_config
    from jobs.throughput.run import run_bench
    from jobs.throughput.tune import tune as tune_job

    config = load_bench_config(job, overrides or [])
    raise typer.Exit(run_bench(config) if tune is None else tune_job(config, tune))


if __name__ == "__main__":
    main()
