"""`rheo run`: checks, then Ray, then the graph, then the counts of what is there."""

from __future__ import annotations

import contextlib
import functools
import glob
import logging
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from filelock import FileLock, Timeout

from engine.errors import EngineError, UserError
from engine.params import SamplingParams
from pipeline import exit_codes, runfile
from pipeline.checks import check_config, check_input, check_model, check_output
from pipeline.config import JobConfig
from pipeline.quiet import divert_noise, quiet_loggers
from pipeline.records import Columns
from pipeline.report import Summary, render, summarize
from pipeline.sources import Plan, find_files

RAY_LOG = "ray.log"

_STAGING = ".staging"


@dataclass(frozen=True)
class _Job:
    config: JobConfig
    plan: Plan
    columns: Columns
    defaults: SamplingParams
    run_id: str


def run_job(config: JobConfig) -> int:
    """Runs a job to its end and returns its exit code. Raises UserError before anything is started, EngineError when the engine failed."""
    defaults = check_config(config)
    output = config.output.path
    check_output(output)
    os.makedirs(output, exist_ok=True)
    with _lock(output):
        finished = _look_at_earlier_run(config)
        if finished is not None:
            return finished
        plan, columns = check_input(config, defaults)
        check_model(config)
        if plan.ignored:
            _note(f"{len(plan.ignored)} files are no input and are left out: {', '.join(plan.ignored[:3])}")
        _note(f"{config.job.name}: {plan.num_records} records in {len(plan.files)} files, {plan.num_rows} rows to {output}/rows")
        if config.output.overwrite:
            _clear(output)
        job = _Job(config, plan, columns, defaults, uuid.uuid4().hex[:8])
        return _execute(job)


def _execute(job: _Job) -> int:
    output = job.config.output.path
    staging = os.path.join(output, _STAGING, job.run_id)
    os.makedirs(os.path.join(output, "rows"), exist_ok=True)
    os.makedirs(staging)
    run = runfile.start(job.config, job.plan.files, run_id=job.run_id, num_records=job.plan.num_records, num_rows=job.plan.num_rows)
    runfile.write(output, run)
    started_at = time.time()
    try:
        stopped_by, state = _generate(job, staging)
    except (EngineError, UserError) as error:
        code = exit_codes.USER_ERROR if isinstance(error, UserError) else exit_codes.ENGINE_FAILURE
        _close(run, "failed", code, summarize(output), started_at, None, output)
        raise
    except KeyboardInterrupt:  # before the handlers were in place: nothing was begun
        _close(run, "interrupted", exit_codes.SIGNAL_BASE + signal.SIGINT, summarize(output), started_at, None, output)
        raise
    finally:
        shutil.rmtree(os.path.join(output, _STAGING), ignore_errors=True)
    summary = summarize(output)
    if stopped_by is not None and summary.num_rows < job.plan.num_rows:
        _close(run, "interrupted", exit_codes.SIGNAL_BASE + stopped_by, summary, started_at, state, output)
        print(render(summary, run, output))
        return run["exit_code"]
    if summary.num_rows != job.plan.num_rows:
        _close(run, "failed", exit_codes.ENGINE_FAILURE, summary, started_at, state, output)
        raise EngineError(f"{summary.num_rows} rows are in {output}/rows and {job.plan.num_rows} were to be: this is a bug in rheo")
    _close(run, "finished", summary.exit_code, summary, started_at, state, output)
    print(render(summary, run, output))
    return run["exit_code"]


def _generate(job: _Job, staging: str) -> tuple[int | None, dict]:
    """Runs the graph. Returns the signal that stopped it, if one did, and the ledger's last counts."""
    import ray

    from pipeline.generate import RowOptions
    from pipeline.graph import prepare_context, run_graph
    from pipeline.progress import ProgressView
    from pipeline.sink import PartSink
    from pipeline.stop import StopCallback, handle_signals
    from pipeline.watch import NodeLost, check_node, run_watched
    from workers.ledger import Ledger

    config = job.config
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with divert_noise(os.path.join(config.output.path, RAY_LOG)), _ray(num_cores):
        check_node()
        prepare_context(StopCallback)
        num_workers, gpus = _size_pool(config)
        threads = config.ray.threads_per_worker or max(1, num_cores // num_workers)
        ledger = ray.remote(Ledger).options(num_cpus=0).remote()

        def read_ledger() -> dict | None:
            try:
                return ray.get(ledger.read.remote(), timeout=5)
            except ray.exceptions.RayError:
                return None

        rows_per_file = config.output.rows_per_file or max(32, min(2048, job.plan.num_rows // 16))
        sink = PartSink(staging=staging, rows=os.path.join(config.output.path, "rows"), run_id=job.run_id, rows_per_file=rows_per_file)
        seed = config.job.seed if job.defaults.seed is None else job.defaults.seed
        options = RowOptions(defaults=job.defaults, chat=config.input.chat, system=config.input.system, seed=seed)
        with handle_signals(lambda: ray.get(ledger.stop.remote())) as received, ProgressView(read_ledger, job.plan.num_rows):
            work = functools.partial(
                run_graph,
                job.plan.chunks,
                job.columns,
                settings=_settings(config, threads),
                options=options,
                ledger=ledger,
                sink=sink,
                num_workers=num_workers,
                gpus_per_worker=gpus,
            )
            try:
                run_watched(work)
            except NodeLost as error:
                if received() is None:
                    raise EngineError(f"{error}; what it left is in {config.output.path}/{RAY_LOG}") from None
                return received(), {}  # the signal went to Ray's processes as well
            except ray.exceptions.RayError as error:
                raise _explain(error, read_ledger()) from None
            state = read_ledger() or {}
            return received(), {**state, "ended_at": time.time()}


def _settings(config: JobConfig, threads: int):
    from workers.generator import EngineSettings

    return EngineSettings(
        kind=config.engine.kind,
        target=config.model.target,
        draft=config.model.draft,
        revision=config.model.revision,
        dtype=config.model.dtype,
        device=config.model.device,
        attention=config.model.attention,
        speculation=config.speculation.to_speculation(),
        max_batch=config.engine.max_batch,
        max_model_len=config.model.max_model_len,
        kv_cache_gib=config.engine.kv_cache_gib,
        reproducible=config.engine.reproducible,
        seed=config.job.seed,
        threads=threads,
    )


def _size_pool(config: JobConfig) -> tuple[int, float]:
    """(workers, GPUs of each). Raises UserError for more GPU workers than there are GPUs: they would wait for ever."""
    import ray

    num_gpus = 0 if config.engine.kind == "fake" or config.model.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    if config.model.device == "cuda" and not num_gpus:
        raise UserError("model.device='cuda', but Ray sees no GPU on this machine; allowed: auto, cpu")
    num_workers = max(1, num_gpus) if config.ray.workers == "auto" else config.ray.workers
    if num_gpus and num_workers > num_gpus:
        raise UserError(f"ray.workers={num_workers}; allowed: at most {num_gpus}, one per GPU")
    return num_workers, 1.0 if num_gpus else 0.0


def _explain(error: Exception, state: dict | None) -> UserError | EngineError:
    """What the engine itself said, where it said something: Ray's own message buries it."""
    if state and state["refusal"]:
        return UserError(state["refusal"])
    cause = getattr(error, "cause", None)  # of a task; an actor that died has none
    if cause is None and state and state["failures"]:
        return EngineError(state["failures"][-1].rstrip())
    if isinstance(cause, EngineError):
        return EngineError(str(cause).splitlines()[0])  # Ray appends advice on its own options
    return EngineError(f"{type(error).__name__}: {error}")


def _close(run: dict, status: str, exit_code: int, summary: Summary, started_at: float, state: dict | None, output: str) -> None:
    now = time.time()
    run.update(status=status, exit_code=exit_code, counts=summary.counts())
    run["timing"] = {"started_at": started_at, "finished_at": now, "total_s": now - started_at}
    if state and state.get("ready_at"):
        run["timing"].update(load_s=state["ready_at"] - started_at, generate_s=state["ended_at"] - state["ready_at"])
    if state:
        run["engines"] = {"starts": state["num_starts"], "deaths": state["num_deaths"], "killed_rows": state["num_condemned"]}
    runfile.write(output, run)


@contextlib.contextmanager
def _lock(output: str) -> Iterator[None]:
    try:
        with FileLock(os.path.join(output, ".lock"), timeout=0):
            yield
    except Timeout:
        raise UserError(f"output.path '{output}' is in use by another run; wait for it, or give another path") from None


def _look_at_earlier_run(config: JobConfig) -> int | None:
    """The exit code of an earlier run when it was this very job and came to its end; None when there is room for a new one.

    Raises UserError when the folder holds other rows.
    """
    output = config.output.path
    run = runfile.read(output)
    parts = _parts(output)
    if config.output.overwrite or not parts:
        return None
    instead = "allowed: output.overwrite=true to drop them, or another output.path"
    if run is None:
        raise UserError(f"'{output}/rows' holds {len(parts)} parts and no {runfile.NAME}; {instead}")
    files, _ = find_files(config.input.path, config.input.format)
    difference = runfile.find_difference(run, config, files)
    if difference is not None:
        raise UserError(f"'{output}' holds the rows of another job; it differs in {difference}; {instead}")
    if run["status"] != "finished":
        raise UserError(f"'{output}' holds a run that did not finish, and resuming is not built yet; {instead}")
    _note(f"this job is finished already; nothing is done (exit code {run['exit_code']}, as then)")
    print(render(summarize(output), run, output))
    return run["exit_code"]


def _clear(output: str) -> None:
    """Removes what a run makes, and nothing else."""
    for path in _parts(output):
        os.unlink(path)
    shutil.rmtree(os.path.join(output, _STAGING), ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(output, runfile.NAME))


def _parts(output: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(output), "rows", "*.parquet"))


@contextlib.contextmanager
def _ray(num_cores: int) -> Iterator[None]:
    """A Ray of our own, or the one that this process has already."""
    import ray.data  # before the loggers are silenced: its import sets their levels

    quiet_loggers()
    if ray.is_initialized():
        yield
        return
    # With one logical CPU a reader could block the writer for ever; engines ask for none.
    ray.init(address="local", num_cpus=max(2, num_cores), include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _note(text: str) -> None:
    print(f"rheo: {text}", file=sys.stderr, flush=True)
