"""The command `rheo` with all its subcommands: those of the pipeline, and the jobs that have code of their own."""

from __future__ import annotations

import typer

from pipeline.cli import JobFile, Overrides, app, main

__all__ = ["main"]  # of pyproject.toml


@app.command("train-draft")
def train_draft(job: JobFile, overrides: Overrides = None) -> None:
    """Train an EAGLE-3 draft for a target on its own answers, or go on with it: OUT/draft is the result."""
    from jobs.train_draft.config import load_train_config
    from jobs.train_draft.run import train_draft

    raise typer.Exit(train_draft(load_train_config(job, overrides or [])))


if __name__ == "__main__":
    main()
