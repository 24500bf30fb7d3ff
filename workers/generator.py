"""An engine inside a Ray actor: many calls at once share it, and its death is survived."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ray

from engine.errors import EngineError, RowError, UserError
from engine.params import Request, Result, Speculation
from workers.engine_thread import EngineThread
from workers.ledger import Key

_LEDGER_TIMEOUT_S = 60
_WATCH_S = 1.0


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine is loaded with; `kind` is `real` or `fake`, the other fields are `Engine.load`'s."""

    kind: str
    target: str
    draft: str
    revision: str | None
    dtype: str
    device: str
    attention: str
    speculation: Speculation
    max_batch: int | str
    max_model_len: int | None
    kv_cache_gib: float | str
    reproducible: bool
    seed: int
    threads: int


def load_engine(settings: EngineSettings):
    """Raises what `Engine.load` raises."""
    options = {name: getattr(settings, name) for name in settings.__dataclass_fields__ if name not in ("kind", "target", "threads")}
    if settings.kind == "fake":
        from engine.fake import FakeEngine

        return FakeEngine.load(settings.target, **options)
    import torch

    torch.set_num_threads(settings.threads)
    from engine.engine import Engine

    return Engine.load(settings.target, **options)


def describe_engine(engine, threads: int) -> dict:
    """What the options came to once every "auto" is resolved; for run.json."""
    speculation = {name: getattr(engine.speculation, name) for name in ("method", "tree_size", "depth", "top_k", "m")}
    names = ("dtype", "device", "attention", "max_batch", "max_model_len", "draft_trained_length")
    return {**speculation, **{name: getattr(engine, name) for name in names}, "threads": threads}


class Generator:
    """Runs requests through one engine. Its methods may be called from many threads.

    Args:
        settings: of the engine.
        ledger: the Ray actor made of `workers.ledger.Ledger`.
    """

    def __init__(self, settings: EngineSettings, ledger):
        self._ledger = ledger
        self._seed = settings.seed
        self._id = ray.get_runtime_context().get_actor_id()  # survives a restart
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self._gate = _Gate()
        refusal = self._ask("start")
        if refusal is not None:
            self._ask("fail", refusal)
            raise EngineError(refusal)
        try:
            self._engine = load_engine(settings)
        except UserError as error:
            self._ask("refuse", str(error))
            raise
        except Exception as error:
            self._ask("fail", "".join(traceback.format_exception(error)))
            raise
        self.has_chat_template = self._engine.has_chat_template
        self.depth = self._engine.speculation.depth or 0
        self.description = describe_engine(self._engine, settings.threads)
        self._thread = EngineThread(self._engine, on_failure=self._die, on_progress=self._report)
        ledger.ready.remote(self.description)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def generate(self, requests: Sequence[Request], keys: Sequence[Key]) -> list[Result | None]:
        """The results in the order of the requests, None for those that are not begun or not finished because the job is being stopped.

        Rows that have killed an engine before run alone, or not at all.

        An engine failure does not return: it ends this process, so that Ray starts it anew and brings the rows back.
        """
        by_key = dict(zip(keys, requests, strict=True))
        with self._gate.shared():  # rows are open in the ledger only while they may be in the engine
            judged = self._ask("begin", keys)
            if judged is None:
                return [None] * len(keys)
            suspects, condemned = judged
            crowd = [key for key in keys if key not in suspects and key not in condemned]
            results = dict(zip(crowd, self._thread.generate([by_key[key] for key in crowd]), strict=True))
            if crowd:
                self._ledger.end.remote(self._id, crowd)
        if condemned:
            results.update((key, _killed(by_key[key], self._seed)) for key in condemned)
            self.count_errors(condemned)
        for key in suspects:
            with self._gate.exclusive():
                if self._ask("begin_alone", key):
                    results[key] = self._thread.generate([by_key[key]])[0]
                    self._ask("end", [key])
        return [results.get(key) for key in keys]  # a suspect that is not begun any more has none

    def _ask(self, method: str, *args):
        return ray.get(getattr(self._ledger, method).remote(self._id, *args), timeout=_LEDGER_TIMEOUT_S)

    def _watch(self) -> None:
        """Learns of a stop from the ledger: Ray has no way to interrupt the calls that wait here."""
        with contextlib.suppress(ray.exceptions.RayError):  # the ledger goes with the job
            while (phase := ray.get(self._ledger.phase.remote())) != "abandon":
                if phase == "finish":
                    self._thread.drop_waiting()
                time.sleep(_WATCH_S)
            self._thread.abandon()

    def count_errors(self, keys: Sequence[Key]) -> None:
        """Rows that ended as errors without coming to the engine: the progress counts them too."""
        self._ledger.count_errors.remote(self._id, keys)

    def _report(self, totals: dict) -> None:
        self._ledger.progress.remote(self._id, totals)

    def _die(self, error: Exception) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # the ledger may be gone with the job: then nobody is left to tell
            self._ask("fail", "".join(traceback.format_exception(error)))
        os._exit(1)


def _killed(request: Request, job_seed: int) -> Result:
    error = RowError("engine_killed", "the engine died twice with this row in it, the second time with nothing else")
    seed = job_seed if request.params.seed is None else request.params.seed
    return Result.failed(request.id, request.sample, error, prompt=request.prompt, seed=seed)


class _Gate:
    """Many callers together, or one alone, who goes first once he waits."""

    def __init__(self):
        self._changed = threading.Condition()
        self._num_shared = 0
        self._num_waiting = 0
        self._is_exclusive = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive and not self._num_waiting)
            self._num_shared += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_shared -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: not self._is_exclusive and not self._num_shared)
            self._num_waiting -= 1
            self._is_exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()
