"""`rheo run`: checks, then what an earlier run left to do, then the closing check of what is there (see `pipeline.job`)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from dataclasses import dataclass

import pyarrow as pa

from engine.errors import EngineError
from engine.params import SamplingParams
from pipeline import exit_codes, runfile
from pipeline.checks import check_config, check_model, check_places, describe_ignored, find_input
from pipeline.columns import Columns
from pipeline.commit import Committer
from pipeline.config import JobConfig
from pipeline.earlier import Earlier, find_rows, read_earlier
from pipeline.error_limit import ErrorLimit
from pipeline.execute import Outcome, Work, execute
from pipeline.fingerprint import describe_job, describe_models
from pipeline.folders import Folder, explained_failures, open_folder
from pipeline.generate import ENGINE
from pipeline.job import Job
from pipeline.models import fetch_models
from pipeline.notes import show, tell
from pipeline.part_writer import PartWriter, TakenOver
from pipeline.report import COLUMNS, Summary, render, summarize
from pipeline.sources import Plan, scan_input
from pipeline.wording import count, format_seconds

_GO_ON = "interrupted; the same command goes on from here"


def run_job(config: JobConfig) -> int:
    """Runs a job to its end, or goes on with it, and returns its exit code.

    Raises UserError before anything is started, and EngineError when the engine failed.
    """
    defaults = check_config(config)
    folder = open_folder(config.output.path, config.output.storage_options)
    check_places(config)
    folder.probe()
    with folder.lock(), explained_failures(folder):
        end = _run_locked(config, defaults, folder)
    if end.report is not None:
        try:
            show(end.report)
        except OSError as error:  # the job has its end, and its exit code
            _note(f"the report cannot be printed: {error}")
    if end.note is not None:
        _note(end.note)
    return end.code


@dataclass(frozen=True)
class _End:
    """The exit code of a job, and what is left to say of it. note: after the report."""

    code: int
    report: str | None = None
    note: str | None = None


def _run_locked(config: JobConfig, defaults: SamplingParams, folder: Folder) -> _End:
    earlier = read_earlier(folder, config)
    files, ignored = find_input(config, earlier.file_names)
    fingerprint = describe_job(config, files)
    earlier.require_same(fingerprint, grow=config.input.grow, whole=False)
    check_model(config)
    if earlier.run is not None:
        earlier.require_same({**fingerprint, **describe_models(config, fetch_models(config))}, grow=config.input.grow, whole=True)
        if earlier.is_finished(config, len(files)):
            summary = summarize(folder, earlier.read_own(folder, COLUMNS))
            if summary.num_rows == earlier.run["num_rows"] and not earlier.late:  # else a killed run has come late to `drop_errors`
                return _repeat(config, folder, earlier, summary)
    columns = Columns(config.input, defaults, config.sampling.n)
    plan = scan_input(files, columns)
    if ignored:
        _note(f"left out {describe_ignored(ignored)}")
    models = fetch_models(config)
    job = _prepare(config, folder, earlier, plan, {**fingerprint, **describe_models(config, models)})
    job.run["models"] = dataclasses.asdict(models)
    work = Work(
        config=config,
        models=models,
        columns=columns,
        defaults=defaults,
        chunks=plan.remaining(job.found.done),
        num_rows=plan.num_rows,
        num_done=job.found.done.count,
        dtype=earlier.dtype if config.model.dtype == "auto" else None,
    )
    return _run(job, work)


def _repeat(config: JobConfig, folder: Folder, earlier: Earlier, summary: Summary) -> _End:
    """A finished job: its report and its exit code, once more."""
    run, code = earlier.run, earlier.repeated_code(config)
    _note(f"this job is finished already; nothing is done (exit code {code}{', as then' if code == run['exit_code'] else ''})")
    return _End(code, render(summary, run, folder.path))


def _prepare(config: JobConfig, folder: Folder, earlier: Earlier, plan: Plan, fingerprint: dict) -> Job:
    found = find_rows(earlier.read_own(folder), plan.row_numbers, retry_errors=config.output.retry_errors)
    run = runfile.start(
        earlier.run,
        config,
        first_part=earlier.next_part,
        fingerprint=fingerprint,
        dropped_runs=earlier.dropped_runs,
        num_records=plan.num_records,
        num_rows=plan.num_rows,
    )
    what = f"{plan.describe()}, {count(plan.num_rows, 'row')} to {folder.path}/rows"
    if found.done.count:
        what += f"; {found.done.count} of them are there already"
    elif config.output.overwrite and earlier.dropped:
        what += f"; the rows of an earlier run ({count(len(earlier.dropped), 'part')}) are dropped for them"
    _note(f"{config.job.name}: {what}")
    return Job(config, folder, earlier, plan, run, found)


def _run(job: Job, work: Work) -> _End:
    """As `_run_to_end`. A run that gives way to a newer one while it is being stopped keeps the exit code of the stop."""
    try:
        return _run_to_end(job, work)
    except TakenOver as error:
        if not isinstance(job.outcome.stopped_by, int):
            raise
        return _End(exit_codes.SIGNAL_BASE + job.outcome.stopped_by, note=str(error))


def _run_to_end(job: Job, work: Work) -> _End:
    """Generates, counts, and closes run.json whatever happens. Raises EngineError, UserError, and what the system raises."""
    try:
        if not (job.config.output.overwrite and job.earlier.dropped):  # else the earlier run.json stays with its rows, for now
            job.announce()
        if work.chunks:
            _generate(job, work)
        summary = job.check_output()
    except TakenOver:
        raise  # run.json is the other run's
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            _note(_GO_ON)
        if job.is_announced:
            job.close_failed(error)
        else:
            _note(f"nothing was generated: what {job.folder.path} held is there as before")
        raise
    num_rows, stopped_by = min(job.found.done.count, summary.num_rows), job.outcome.stopped_by
    status, code = "finished", summary.exit_code
    if num_rows < job.plan.num_rows:
        if stopped_by is None:
            status, code = "failed", exit_codes.ENGINE_FAILURE
        elif isinstance(stopped_by, int):
            status, code = "interrupted", exit_codes.SIGNAL_BASE + stopped_by
        else:
            status, code = "stopped", exit_codes.TOO_MANY_ERRORS
    job.close(status, code, summary)
    if status == "failed":
        raise EngineError(f"{num_rows} of {count(job.plan.num_rows, 'row')} came back from Ray; run the same command again")
    notes = {
        "interrupted": _GO_ON,
        "stopped": f"stopped: {stopped_by}; raise the limit and run the same command again, or mend the input and drop these rows "
        "with output.overwrite=true",
    }
    return _End(code, render(summary, job.run, job.folder.path), notes.get(status))


def _generate(job: Job, work: Work) -> None:
    config = job.config
    kept_errors = 0 if config.output.retry_errors else job.found.num_errors
    limit = ErrorLimit(config.input.max_errors, num_rows=job.found.done.count, num_errors=kept_errors)
    if limit.is_exceeded:
        job.outcome = Outcome(limit.describe(), None)
        return
    writer = PartWriter(
        job.folder,
        run_id=job.run["run_id"],
        earlier_runs=set(job.run["runs"]),
        dropped_runs=set(job.run["dropped_runs"]),
        row_numbers=job.plan.row_numbers,
        done=job.found.done,
        next_part=job.earlier.next_part,
        before_first=job.make_ready,
    )
    committer = Committer(writer.write, config.output.rows_per_file or max(32, min(2048, job.plan.num_rows // 16)))

    def take(table: pa.Table) -> str | None:
        if "first_row_s" not in job.run["timing"]:
            job.run["timing"]["first_row_s"] = time.time() - job.started_at
            _note(f"first new rows after {format_seconds(job.run['timing']['first_row_s'])}")
            job.run["engine"] = json.loads(table.schema.metadata[ENGINE])
        try:
            committer.add(table)
        except TakenOver as error:
            return str(error)  # not raised here, where nobody could tell that a signal came first
        limit.add(table)
        return limit.describe() if limit.is_exceeded else None

    try:
        with job.folder.log_folder() as logs:
            job.outcome = execute(work, take, committer.close, logs)
    except BaseException:
        with contextlib.suppress(EngineError):  # the first error says more
            committer.close()
        raise
    committer.close()


def _note(text: str) -> None:
    tell(f"rheo: {text}")
