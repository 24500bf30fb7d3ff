"""`rheo run`: checks, then what an earlier run left to do, then the closing check of what is there."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
import uuid
from dataclasses import dataclass, field

import pyarrow as pa

from engine.errors import EngineError, UserError
from pipeline import exit_codes, runfile
from pipeline.checks import check_config, check_model, check_places, describe_ignored, find_input
from pipeline.columns import Columns
from pipeline.commit import Committer
from pipeline.config import JobConfig
from pipeline.earlier import Earlier, Found, find_rows, read_earlier
from pipeline.error_limit import ErrorLimit
from pipeline.execute import Outcome, Work, execute
from pipeline.fingerprint import describe_job, describe_models
from pipeline.folders import Folder, explained_failures, open_folder
from pipeline.models import fetch_models
from pipeline.part_writer import PartWriter, TakenOver
from pipeline.parts import drop_errors, list_parts, read_parts
from pipeline.report import Summary, render, summarize
from pipeline.sources import Plan, scan_input
from pipeline.wording import count, format_seconds


@dataclass
class _Job:
    """One run of a job. run: its run.json. found: what earlier runs of it left; its rows grow by those that this run adds."""

    config: JobConfig
    folder: Folder
    earlier: Earlier
    plan: Plan
    run: dict
    found: Found
    is_announced: bool = False  # run.json is this run's
    started_at: float = field(default_factory=time.time)


def run_job(config: JobConfig) -> int:
    """Runs a job to its end, or goes on with it, and returns its exit code.

    Raises UserError before anything is started, and EngineError when the engine failed.
    """
    defaults = check_config(config)
    folder = open_folder(config.output.path, config.output.storage_options)
    check_places(config)
    folder.probe()
    with folder.lock(), explained_failures(folder):
        earlier = read_earlier(folder, config)
        files, ignored = find_input(config, earlier.file_names)
        fingerprint = describe_job(config, files)
        earlier.require_same(fingerprint, grow=config.input.grow, whole=False)
        check_model(config)
        if earlier.run is not None:
            earlier.require_same({**fingerprint, **describe_models(config, fetch_models(config))}, grow=config.input.grow, whole=True)
            if earlier.is_finished(config, len(files)):
                return _repeat(config, folder, earlier.run)
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


def _repeat(config: JobConfig, folder: Folder, run: dict) -> int:
    """A finished job: its report and its exit code, once more; a job that was to grow and has not is no failure."""
    code = exit_codes.OK if config.input.grow else run["exit_code"]
    _note(f"this job is finished already; nothing is done (exit code {code}{', as then' if code == run['exit_code'] else ''})")
    print(render(summarize(folder), run, folder.path))
    return code


def _prepare(config: JobConfig, folder: Folder, earlier: Earlier, plan: Plan, fingerprint: dict) -> _Job:
    found = find_rows(read_parts(folder, earlier.parts.values()), plan.row_numbers, retry_errors=config.output.retry_errors)
    run = runfile.start(
        earlier.run,
        config,
        run_id=uuid.uuid4().hex[:8],
        first_part=earlier.next_part,
        fingerprint=fingerprint,
        dropped_runs=runfile.known_runs(folder) if config.output.overwrite else [],
        num_records=plan.num_records,
        num_rows=plan.num_rows,
    )
    what = f"{plan.describe()}, {count(plan.num_rows, 'row')} to {folder.path}/rows"
    _note(f"{config.job.name}: {what}" + (f"; {found.done.count} of them are there already" if found.done.count else ""))
    return _Job(config, folder, earlier, plan, run, found)


def _run(job: _Job, work: Work) -> int:
    """Generates, counts, and closes run.json whatever happens. Raises EngineError, UserError, and what the system raises."""
    try:
        if not (job.config.output.overwrite and job.earlier.dropped):  # else the earlier run.json stays with its rows, for now
            _announce(job)
        outcome = _generate(job, work) if work.chunks else Outcome(None, None)
        summary = _check_output(job)
    except TakenOver:
        raise  # run.json is the other run's
    except BaseException as error:
        _close_failed(job, error)
        raise
    status, code = "finished", summary.exit_code
    if outcome.stopped_by is not None and summary.num_rows < job.plan.num_rows:
        is_signal = isinstance(outcome.stopped_by, int)
        status = "interrupted" if is_signal else "stopped"
        code = exit_codes.SIGNAL_BASE + outcome.stopped_by if is_signal else exit_codes.TOO_MANY_ERRORS
    elif summary.num_rows < job.plan.num_rows:
        status, code = "failed", exit_codes.ENGINE_FAILURE
    _close(job, status, code, summary, outcome.state)
    if status == "failed":
        raise EngineError(f"{summary.num_rows} of {count(job.plan.num_rows, 'row')} came back from Ray; run the same command again")
    print(render(summary, job.run, job.folder.path))
    if status == "stopped":
        _note(f"stopped: {outcome.stopped_by}; mend the input, or raise the limit and run the same command again")
    return code


def _generate(job: _Job, work: Work) -> Outcome:
    config = job.config
    writer = PartWriter(
        job.folder,
        run_id=job.run["run_id"],
        earlier_runs=set(job.run["runs"]),
        dropped_runs=set(job.run["dropped_runs"]),
        row_numbers=job.plan.row_numbers,
        done=job.found.done,
        next_part=job.earlier.next_part,
        before_first=lambda: _make_ready(job),
    )
    committer = Committer(writer.write, config.output.rows_per_file or max(32, min(2048, job.plan.num_rows // 16)))
    kept_errors = 0 if config.output.retry_errors else job.found.num_errors
    limit = ErrorLimit(config.input.max_errors, num_rows=job.found.done.count, num_errors=kept_errors)

    def take(table: pa.Table) -> str | None:
        if "first_row_s" not in job.run["timing"]:
            job.run["timing"]["first_row_s"] = time.time() - job.started_at
            _note(f"first new row after {format_seconds(job.run['timing']['first_row_s'])}")
        committer.add(table)
        limit.add(table)
        return limit.describe() if limit.is_exceeded else None

    try:
        with job.folder.log_folder() as logs:
            outcome = execute(work, take, committer.close, logs)
    except BaseException:
        with contextlib.suppress(EngineError):  # the first error says more
            committer.close()
        raise
    committer.close()
    return outcome


def _announce(job: _Job) -> None:
    """From here on the output is this run's. Raises TakenOver when it is another's already."""
    before = job.earlier.run and job.earlier.run["run_id"]
    current = None if job.config.output.overwrite else runfile.read(job.folder)
    if current is not None and current["run_id"] != before:
        raise TakenOver(f"another run ({current['run_id']}) writes into '{job.folder.path}'; this one stops before it has begun")
    runfile.write(job.folder, job.run)
    job.is_announced = True


def _make_ready(job: _Job) -> None:
    """Just before the first new part: drops what it replaces. Until then a run that fails leaves everything as it was."""
    if not job.is_announced:
        _announce(job)
    elif runfile.read(job.folder)["run_id"] != job.run["run_id"]:
        raise TakenOver(f"another run writes into '{job.folder.path}'; this one stops, its rows so far stay")
    for name in job.earlier.dropped.values():
        job.folder.delete(name)
    if job.config.output.retry_errors:
        for name in job.found.with_errors:
            drop_errors(job.folder, name)


def _check_output(job: _Job) -> Summary:
    """Reads back what is there: footers, schema, keys. Raises EngineError for a row that is twice, or not of the job."""
    if not job.is_announced:  # of a run that overwrites and came to no row
        return Summary()
    parts = list_parts(job.folder)
    for number, name in parts.items():
        if number < job.run["first_part"]:  # of a job that was overwritten, come late
            job.folder.delete(name)
    kept = [name for number, name in parts.items() if number >= job.run["first_part"]]
    num_rows = find_rows(read_parts(job.folder, kept), job.plan.row_numbers).done.count
    summary = summarize(job.folder)
    if summary.num_rows != num_rows:
        raise EngineError(f"'{job.folder.path}/rows' changed while it was counted ({num_rows} and {summary.num_rows} rows)")
    return summary


def _close(job: _Job, status: str, exit_code: int, summary: Summary, state: dict | None) -> None:
    run, now = job.run, time.time()
    run.update(status=status, exit_code=exit_code, counts=summary.counts())
    run["timing"].update(started_at=job.started_at, finished_at=now, total_s=now - job.started_at)
    if state and state["ready_at"]:
        run["timing"].update(load_s=state["ready_at"] - job.started_at, generate_s=state["ended_at"] - state["ready_at"])
        run["engine"] = state["engine"]
    if state:
        run["engines"] = {"starts": state["num_starts"], "deaths": state["num_deaths"], "killed_rows": state["num_condemned"]}
    if job.is_announced:
        runfile.write(job.folder, run)


def _close_failed(job: _Job, error: BaseException) -> None:
    status, code = "failed", 1
    if isinstance(error, KeyboardInterrupt):
        status, code = "interrupted", exit_codes.SIGNAL_BASE + signal.SIGINT
    elif isinstance(error, UserError | EngineError | OSError):
        code = exit_codes.USER_ERROR if isinstance(error, UserError) else exit_codes.ENGINE_FAILURE
    if not job.is_announced:
        _note(f"nothing was generated: what {job.folder.path} held is there as before")
        return
    with contextlib.suppress(OSError):  # of a full disk, perhaps: `error` says more
        try:
            summary = summarize(job.folder)
        except EngineError:  # perhaps `error` itself
            summary = Summary()
        _close(job, status, code, summary, None)


def _note(text: str) -> None:
    print(f"rheo: {text}", file=sys.stderr, flush=True)
