"""`rheo run`: checks, then Ray, then the graph, then the counts of what is there."""

from __future__ import annotations

import contextlib
import dataclasses
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
from pipeline.columns import Columns
from pipeline.config import JobConfig
from pipeline.files import find_files
from pipeline.models import Models, fetch_models
from pipeline.quiet import divert_noise, quiet_loggers
from pipeline.report import Summary, render, summarize
from pipeline.sources import Plan
from pipeline.wording import count

RAY_LOG = "ray.log"

_STAGING = ".staging"
_EARLIER = ".old-"  # and the new run's id


@dataclass(frozen=True)
class _Job:
    config: JobConfig
    plan: Plan
    columns: Columns
    defaults: SamplingParams
    models: Models
    run_id: str

    @property
    def earlier(self) -> str:
        """Where the rows that this run overwrites wait until it has rows of its own."""
        return os.path.join(self.config.output.path, f"{_EARLIER}{self.run_id}")


def run_job(config: JobConfig) -> int:
    """Runs a job to its end and returns its exit code. Raises UserError before anything is started, EngineError when the engine failed."""
    defaults = check_config(config)
    output = config.output.path
    check_output(output)
    os.makedirs(output, exist_ok=True)
    with _lock(output):
        _bring_back(output)  # of a run that was killed before it had a part of its own
        finished = find_finished_run(config)
        if finished is not None:
            _note(f"this job is finished already; nothing is done (exit code {finished['exit_code']}, as then)")
            print(render(summarize(output), finished, output))
            return finished["exit_code"]
        plan, columns = check_input(config, defaults)
        check_model(config)
        if plan.ignored:
            _note(f"left out {plan.describe_ignored()}")
        _note(f"{config.job.name}: {plan.describe()}, {count(plan.num_rows, 'row')} to {output}/rows")
        return _execute(_Job(config, plan, columns, defaults, fetch_models(config), uuid.uuid4().hex[:8]))


def _execute(job: _Job) -> int:
    """Generates, counts, and closes run.json whatever happens. Raises EngineError, UserError, and what the system raises."""
    output = job.config.output.path
    os.makedirs(os.path.join(output, "rows"), exist_ok=True)
    run = runfile.start(job.config, job.plan.files, run_id=job.run_id, num_records=job.plan.num_records, num_rows=job.plan.num_rows)
    run["models"] = dataclasses.asdict(job.models)
    started_at = time.time()
    try:
        if job.config.output.overwrite:
            _set_aside(output, job.earlier)
        runfile.write(output, run)
        with _staging(output, job.run_id) as staging:
            stopped_by, state = _generate(job, staging)
        summary = summarize(output)
        status, code = "finished", summary.exit_code
        if stopped_by is not None and summary.num_rows < job.plan.num_rows:
            status, code = "interrupted", exit_codes.SIGNAL_BASE + stopped_by
        elif summary.num_rows != job.plan.num_rows:
            status, code = "failed", exit_codes.ENGINE_FAILURE
        _close(run, status, code, summary, started_at, state, output)
    except BaseException as error:
        _close_failed(run, error, started_at, output)
        _bring_back(output)
        raise
    _bring_back(output)
    if status == "failed":
        raise EngineError(f"{summary.num_rows} rows are in {output}/rows and {job.plan.num_rows} were to be: this is a bug in rheo")
    print(render(summary, run, output))
    return code


@contextlib.contextmanager
def _staging(output: str, run_id: str) -> Iterator[str]:
    """A folder for parts that are being written; gone afterwards, so that a writer left over can write nothing."""
    root = os.path.join(output, _STAGING)
    shutil.rmtree(root, ignore_errors=True)  # of a run that was killed
    os.makedirs(os.path.join(root, run_id))
    try:
        yield os.path.join(root, run_id)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _generate(job: _Job, staging: str) -> tuple[int | None, dict | None]:
    """Runs the graph. Returns the signal that stopped it, if one did, and the ledger's last counts where it could still be asked."""
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
        rows = os.path.join(config.output.path, "rows")
        sink = PartSink(staging=staging, rows=rows, earlier=job.earlier, run_id=job.run_id, rows_per_file=rows_per_file)
        seed = config.job.seed if job.defaults.seed is None else job.defaults.seed
        options = RowOptions(defaults=job.defaults, input=config.input, seed=seed)
        with handle_signals(lambda: ray.get(ledger.stop.remote())) as received, ProgressView(read_ledger, job.plan.num_rows):
            work = functools.partial(
                run_graph,
                job.plan.chunks,
                job.columns,
                settings=_settings(config, job.models, threads),
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
                return received(), None  # the signal went to Ray's processes as well
            except ray.exceptions.RayError as error:
                raise _explain(error, read_ledger()) from None
            state = read_ledger()
            return received(), state and {**state, "ended_at": time.time()}


def _settings(config: JobConfig, models: Models, threads: int):
    from workers.generator import EngineSettings

    return EngineSettings(
        kind=config.engine.kind,
        **dataclasses.asdict(models),
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
    if state and state["ready_at"]:
        run["timing"].update(load_s=state["ready_at"] - started_at, generate_s=state["ended_at"] - state["ready_at"])
        run["engine"] = state["engine"]
    if state:
        run["engines"] = {"starts": state["num_starts"], "deaths": state["num_deaths"], "killed_rows": state["num_condemned"]}
    runfile.write(output, run)


def _close_failed(run: dict, error: BaseException, started_at: float, output: str) -> None:
    status, code = "failed", 1
    if isinstance(error, KeyboardInterrupt):
        status, code = "interrupted", exit_codes.SIGNAL_BASE + signal.SIGINT
    elif isinstance(error, UserError | EngineError):
        code = exit_codes.USER_ERROR if isinstance(error, UserError) else exit_codes.ENGINE_FAILURE
    with contextlib.suppress(OSError):  # of a full disk, perhaps: `error` says more
        try:
            summary = summarize(output)
        except EngineError:  # perhaps `error` itself
            summary = Summary()
        _close(run, status, code, summary, started_at, None, output)


@contextlib.contextmanager
def _lock(output: str) -> Iterator[None]:
    try:
        with FileLock(os.path.join(output, ".lock"), timeout=0):
            yield
    except Timeout:
        raise UserError(f"output.path '{output}' is in use by another run; wait for it, or give another path") from None


def find_finished_run(config: JobConfig) -> dict | None:
    """The run.json of an earlier run that was this very job and came to its end; None when there is room for a new one.

    Raises UserError when the folder holds other rows.
    """
    output = config.output.path
    parts = _parts(output)
    if config.output.overwrite or not parts:
        return None
    run = runfile.read(output)
    instead = "allowed: output.overwrite=true to drop them, or another output.path"
    if run is None:
        raise UserError(f"'{output}/rows' holds {len(parts)} parts and no {runfile.NAME}; {instead}")
    files, _ = find_files(config.input.path, config.input.format)
    difference = runfile.find_difference(run, config, files)
    if difference is not None:
        raise UserError(f"'{output}' holds the rows of another job; it differs in {difference}; {instead}")
    if run["status"] != "finished":
        raise UserError(f"'{output}' holds a run that did not finish, and resuming is not built yet; {instead}")
    return run


def _set_aside(output: str, folder: str) -> None:
    """Moves the rows of an earlier run and its run.json, and nothing else."""
    parts = _parts(output)
    if not parts:
        return
    os.mkdir(folder)
    for path in [os.path.join(output, runfile.NAME), *parts]:
        with contextlib.suppress(FileNotFoundError):  # parts without a run.json are overwritten too
            os.rename(path, os.path.join(folder, os.path.basename(path)))


def _bring_back(output: str) -> None:
    """Undoes `_set_aside` for a run that came to no part of its own."""
    folders = glob.glob(os.path.join(glob.escape(output), _EARLIER + "*"))
    for folder in folders:
        for name in os.listdir(folder):
            os.replace(os.path.join(folder, name), os.path.join(output, "" if name == runfile.NAME else "rows", name))
        os.rmdir(folder)
    if folders:
        _note(f"nothing was generated: the earlier run's rows are in {output}/rows again")


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
