"""The two stages that run on Ray workers: capture and training."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError, UserError
from jobs.train_draft import checkpoints
from jobs.train_draft.config import TrainDraftConfig
from pipeline.notes import tell
from pipeline.quiet import divert_noise
from pipeline.ray_session import ray_session
from pipeline.wording import count, format_seconds

_TELL_S = 10.0
_POLL_S = 1.0


@dataclass(frozen=True)
class Pool:
    """num_workers of `threads` threads each; gpus of each: 0 or 1."""

    num_workers: int
    threads: int
    gpus: int


@contextlib.contextmanager
def ray_pool(config: TrainDraftConfig, log: Path) -> Iterator[Pool]:
    """A Ray for one stage. log: of what its processes print.

    Raises UserError for more workers than there are GPUs and what a worker raised of its own; EngineError for a worker that died.
    """
    import ray

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with divert_noise(str(log)), ray_session(num_cores):
        num_gpus = 0 if config.model.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        wanted = config.ray.workers
        if num_gpus and wanted != "auto" and wanted > num_gpus:
            raise UserError(f"ray.workers={wanted}; allowed: at most {num_gpus}, one per GPU")
        num_workers = max(1, num_gpus) if wanted == "auto" else wanted
        threads = config.ray.threads_per_worker or max(1, num_cores // num_workers)
        try:
            yield Pool(num_workers, threads, 1 if num_gpus else 0)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from None
            raise EngineError(f"{error.cause!r}; more is in {log}") from None
        except ray.exceptions.RayError as error:
            raise EngineError(f"{type(error).__name__}: {error}; more is in {log}") from None


def find_missing(answers: Path, features: Path) -> list[Path]:
    """The parts of the answers that have no shard of features."""
    return [part for part in sorted(answers.glob("rows/*.parquet")) if not _shard_of(part, features).exists()]


def capture(config: TrainDraftConfig, pool: Pool, parts: list[Path], features: Path, feature_layers: tuple[int, ...]) -> None:
    """A shard of features for each of these parts."""
    import ray
    from ray.util import ActorPool

    from jobs.train_draft.capture import Capture

    features.mkdir(exist_ok=True)
    worker = ray.remote(Capture).options(num_cpus=0, num_gpus=pool.gpus)
    actors = [
        worker.remote(
            target=config.model.target,
            revision=config.model.revision,
            dtype=config.model.dtype,
            device=config.model.device,
            feature_layers=feature_layers,
            max_tokens=config.answers.max_tokens,
            threads=pool.threads,
        )
        for _ in range(min(pool.num_workers, len(parts)))
    ]
    results = ActorPool(actors).map_unordered(lambda actor, part: actor.write.remote(part, _shard_of(part, features)), parts)
    began, told_at, num_tokens, left_out = time.monotonic(), 0.0, 0, 0
    for done, result in enumerate(results, 1):
        num_tokens, left_out = num_tokens + result["tokens"], left_out + result["left_out"]
        seconds = time.monotonic() - began
        if time.monotonic() - told_at > _TELL_S or done == len(parts):
            told_at = time.monotonic()
            left = format_seconds(seconds / done * (len(parts) - done))
            tell(f"features: {done}/{len(parts)} parts | {num_tokens / seconds:.0f} tokens/s | {left} left")
    if left_out:
        tell(f"features: {count(left_out, 'row')} gave nothing to learn from (failed, too short, or a prompt that cannot be read back)")
    for actor in actors:
        ray.kill(actor)  # training needs its memory


def _shard_of(part: Path, features: Path) -> Path:
    return features / f"{part.stem}.safetensors"


def train(pool: Pool, settings: dict, log: Path) -> None:
    """To the last step. settings: of jobs.train_draft.training.Settings, but for what the pool says. Raises EngineError."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    from jobs.train_draft.training import run_worker

    folder = Path(settings["folder"])
    folder.mkdir(exist_ok=True)
    trainer = TorchTrainer(
        run_worker,
        train_loop_config={**settings, "threads": pool.threads, "device": "cuda" if pool.gpus else "cpu"},
        scaling_config=ScalingConfig(
            num_workers=pool.num_workers, use_gpu=bool(pool.gpus), resources_per_worker=None if pool.gpus else {"CPU": 1}
        ),
        run_config=RunConfig(name="ray", storage_path=str(folder)),
    )
    failures: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # handed over: the waiting thread raises it
            failures.append(error)

    # Not in the main thread, where Ray Train would handle Ctrl-C itself, and end the process with code 1
    thread = threading.Thread(target=fit, name="training", daemon=True)
    seen = len(checkpoints.read_log(folder))
    thread.start()
    is_over = False
    while not is_over:
        thread.join(_POLL_S)
        is_over = not thread.is_alive()
        entries = checkpoints.read_log(folder)
        for entry in entries[seen:]:
            tell(describe(entry, settings["steps"], entries))
        seen = len(entries)
    for error in failures:
        if isinstance(error, TrainingFailedError):
            raise EngineError(f"training failed: {str(error).strip().splitlines()[-1]}; more is in {log}") from None
        raise error


def describe(entry: dict, steps: int, entries: list[dict]) -> str:
    """One line for one entry of the log."""
    if "validation" in entry:
        rates = " ".join(f"{value:.3f}" for value in entry["validation"]["acceptance"])
        return f"train: step {entry['step']}/{steps} | held out: acceptance by draft step {rates}"
    first = next(one for one in entries if one["step"] and "loss" in one)
    pace = (entry["seconds"] - first["seconds"]) / max(1, entry["step"] - first["step"]) or entry["seconds"] / entry["step"]
    rates = " ".join(f"{value:.3f}" for value in entry["acceptance"])
    left = format_seconds(pace * (steps - entry["step"]))
    return f"train: step {entry['step']}/{steps} | loss {entry['loss']:.3f} | acceptance {rates} | {pace:.2f} s/step | {left} left"
