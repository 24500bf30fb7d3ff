"""The part of a run that needs Ray: an engine pool, the graph over what is still to be done, and a stop in the middle of it."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa

from engine.errors import EngineError, UserError
from engine.params import SamplingParams
from pipeline import exit_codes
from pipeline.columns import Columns
from pipeline.config import JobConfig
from pipeline.epitaph import epitaph
from pipeline.models import Models
from pipeline.quiet import divert_noise
from pipeline.ray_session import ray_session
from pipeline.sources import Chunk

RAY_LOG = "ray.log"
_FLUSH_S = 3.0
_EPITAPH = "rheo: the process was ended before it could close the job; if Ray did it, '{log}' says why; the same command goes on"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be generated. num_rows: of the whole job; num_done: of those, what is there already. dtype: None is `model.dtype`."""

    config: JobConfig
    models: Models
    columns: Columns
    defaults: SamplingParams
    chunks: list[Chunk]
    num_rows: int
    num_done: int
    dtype: str | None


@dataclass
class Outcome:
    """How it ended. stopped_by: a signal, or what was given to `stop`; None at the end of the work. state: the ledger's last counts."""

    stopped_by: int | str | None
    state: dict | None


def execute(work: Work, take: Callable[[pa.Table], str | None], flush: Callable[[], None], log_folder: str) -> Outcome:
    """Generates every row that is missing and hands tables of results to `take`, which may answer with a reason to stop.

    Ends the process, after `flush`, when a stop finds even Ray's executor hung.

    Raises EngineError when an engine failed, UserError when it cannot be loaded as asked, and what `take` raises.
    """
    import ray

    from pipeline.generate import RowOptions
    from pipeline.graph import prepare_context, stream_results
    from pipeline.progress import ProgressView
    from pipeline.stop import StopCallback, StopOverdue, handle_signals
    from pipeline.watch import NodeLost, WorkHung, check_node, run_watched
    from workers.ledger import Ledger

    config = work.config
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    log = os.path.join(log_folder, RAY_LOG)
    with handle_signals() as stop, epitaph(_EPITAPH.format(log=log)), divert_noise(log), ray_session(num_cores):
        stop.ray_has_started()
        if stop.requested:
            return Outcome(stop.reason, None)
        check_node()
        prepare_context(StopCallback)
        num_workers, gpus = _size_pool(config)
        threads = config.ray.threads_per_worker or max(1, num_cores // num_workers)
        ledger = ray.remote(Ledger).options(num_cpus=0).remote()

        def read_ledger() -> dict | None:
            try:
                return {**ray.get(ledger.read.remote(), timeout=5), "ended_at": time.time()}
            except ray.exceptions.RayError:
                return None

        seed = config.job.seed if work.defaults.seed is None else work.defaults.seed
        stream = functools.partial(
            stream_results,
            work.chunks,
            work.columns,
            settings=_settings(work, threads),
            options=RowOptions(defaults=work.defaults, input=config.input, seed=seed),
            ledger=ledger,
            num_workers=num_workers,
            gpus_per_worker=gpus,
        )
        with stop.telling(ledger), ProgressView(read_ledger, work.num_rows, work.num_done):

            def run() -> None:
                for table in stream():
                    reason = take(table)
                    if reason is not None and not stop.requested:
                        stop.request(reason)

            try:
                run_watched(run, stop)
            except StopOverdue:
                return Outcome(stop.reason, read_ledger())
            except WorkHung:
                _leave(stop.reason, flush)
            except NodeLost as error:
                if not stop.requested:
                    raise EngineError(f"{error}; what it left is in {log}") from None
                return Outcome(stop.reason, None)  # the signal went to Ray's processes as well
            except ray.exceptions.RayError as error:
                if stop.requested:
                    return Outcome(stop.reason, None)  # as above
                raise _explain(error, read_ledger()) from None
            return Outcome(stop.reason, read_ledger())


def _leave(reason: int | str, flush: Callable[[], None]) -> NoReturn:
    """Shutting Ray down under a running execution would end the process too, with a code of Ray's own."""
    thread = threading.Thread(target=flush, daemon=True)  # the disk may be what hangs
    thread.start()
    thread.join(_FLUSH_S)
    os._exit(exit_codes.SIGNAL_BASE + reason if isinstance(reason, int) else exit_codes.TOO_MANY_ERRORS)


def _settings(work: Work, threads: int):
    from workers.generator import EngineSettings

    config = work.config
    return EngineSettings(
        kind=config.engine.kind,
        **dataclasses.asdict(work.models),
        dtype=work.dtype or config.model.dtype,
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
    """What the engine itself said, where it said something: Ray's own message buries it. Tracebacks are printed: to ray.log."""
    if state and state["refusal"]:
        return UserError(state["refusal"])
    cause = getattr(error, "cause", None)  # of a task; an actor that died has none
    if isinstance(cause, UserError | EngineError):  # UserError: of input that cannot be read any more, or is not what it was
        return EngineError(str(cause).splitlines()[0])  # Ray appends advice on its own options
    whole = f"{type(error).__name__}: {error}"
    if cause is None and state and state["failures"]:
        whole = state["failures"][-1]
    said = _find_message(whole)
    if len(whole.split("\n")) == 1:
        return EngineError(said)
    print(whole)
    return EngineError(f"{said} (all of it is in {RAY_LOG})")


def _find_message(text: str) -> str:
    """The first line that is no frame, after the last one that is, of a text that may be a traceback."""
    lines = text.splitlines()
    last = max((number for number, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    said = next((line for line in lines[last + 1 :] if line.strip() and not line.startswith(" ")), text)
    return said.removeprefix(f"{EngineError.__module__}.{EngineError.__name__}: ")
