"""The command `rheo`.

Exit codes: 0 every row ok, 2 user error, 3 some rows failed, 4 every row failed, 5 engine failure, 6 too many errors, 130/143 stopped.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from engine.errors import EngineError, UserError, unknown_name
from pipeline import exit_codes
from pipeline.notes import drop_output, show, tell

app = typer.Typer(
    name="rheo",
    help="Offline batch generation with lossless speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JobFile = Annotated[str, typer.Argument(metavar="JOB.yaml", help="The job's configuration.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options over the file's, as sampling.n=4.")]
Output = Annotated[str, typer.Argument(metavar="OUT", help="The output.path of a job.")]


@app.command()
def run(job: JobFile, overrides: Overrides = None) -> None:
    """Run a job, or go on with it: read the input, generate what is missing, write OUT/rows/*.parquet and OUT/run.json."""
    from pipeline.config import load_config
    from pipeline.run import run_job

    raise typer.Exit(run_job(load_config(job, overrides or [])))


@app.command()
def check(job: JobFile, overrides: Overrides = None) -> None:
    """Do every check that needs no model load: options, input, output, model names."""
    from pipeline.check import check_job
    from pipeline.config import load_config

    show(check_job(load_config(job, overrides or [])))


@app.command()
def report(out: Output) -> None:
    """Print what a run has produced: statuses, errors, tau, tokens/s, two samples."""
    from pipeline.folders import explained_failures, open_folder
    from pipeline.report import read_report

    with explained_failures(open_folder(out), UserError):
        text = read_report(out)
    show(text)


@app.command()
def export(out: Output, format: Annotated[str, typer.Option(help="jsonl: one JSON object per row.")] = "jsonl") -> None:
    """Write the rows of a run to standard output as plain lines."""
    from pipeline.export import FORMATS, export_rows

    if format not in FORMATS:
        raise UserError(unknown_name("--format", format, FORMATS))
    sys.stdout.reconfigure(encoding="utf-8")
    try:
        export_rows(out, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def main() -> None:
    """The entry point of the command; ends the process."""
    # A container's process 1 gets no SIGTERM without a handler. Rows in flight get another one: `pipeline.stop`.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(exit_codes.SIGNAL_BASE + number))
    sys.exit(call(app))


def call(command: Callable[..., object]) -> int:
    """The exit code of a command; its errors go to stderr, a user's without a traceback."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the caller
        stream.reconfigure(errors="replace")  # a prompt may hold what the terminal's encoding has not
    try:
        command(standalone_mode=True)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1
    except UserError as error:
        tell(f"rheo: {error}")
        return exit_codes.USER_ERROR
    except EngineError as error:
        tell(f"rheo: engine failure: {error}")
        return exit_codes.ENGINE_FAILURE
    except OSError as error:  # of the terminal, or of a file beside the output's
        tell(f"rheo: {error}")
        return exit_codes.ENGINE_FAILURE
    return exit_codes.OK


if __name__ == "__main__":
    main()
