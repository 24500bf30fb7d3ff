"""The training loop, one worker of it. Any number of workers run it under Ray Train; each takes its share of every step's windows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.models.checkpoint import load_eagle3
from engine.models.eagle3 import Eagle3Head
from engine.models.loading import load_causal_lm
from engine.options import resolve_dtype
from jobs.train_draft import checkpoints
from jobs.train_draft.batches import Batches
from jobs.train_draft.head import choose_vocabulary, make_config, new_head
from jobs.train_draft.held_out import is_held_out
from jobs.train_draft.loss import METRICS, Objective
from jobs.train_draft.optimizers import make_optimizers
from jobs.train_draft.schedule import Schedule
from jobs.train_draft.shards import Corpus
from jobs.train_draft.unroll import Batch, Unroll

VALIDATION_STEPS = 6
_VALIDATION_BATCH, _VALIDATION_QUERIES, _VALIDATION_BATCHES = 16, 32, 24

_LOG_S = 10.0
_SCALE_TEXTS = 64  # from which the features' spread is taken
_MAX_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """target: the model's folder. init: of a head, or None. corpus, folder: of the shards, and of what this leaves.

    dtype: `auto`, or as in `ModelSection`. device: cpu or cuda. The other fields: those of `TrainSection` and `DraftSection`.
    """

    target: str
    init: str | None
    corpus: str
    folder: str
    dtype: str
    device: str
    seed: int
    threads: int
    max_tokens: int
    vocab_size: int
    intermediate_size: int | None
    feature_layers: tuple[int, ...] | None
    steps: int
    batch: int
    queries: int
    draft_steps: int
    columns: int | None
    step_weight: float
    acceptance_share: float
    learning_rate: float
    warmup: int
    decay: float
    validation: float
    validate_every: int
    checkpoint_s: float


def run_worker(values: dict[str, Any]) -> None:
    """What Ray Train calls in each worker. values: of a Settings."""
    import ray.train

    context = ray.train.get_context()
    Training(Settings(**values), rank=context.get_world_rank(), world=context.get_world_size()).run()


class Training:
    """One worker."""

    def __init__(self, settings: Settings, *, rank: int = 0, world: int = 1):
        self._settings, self._rank, self._world = settings, rank, world
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self._device = torch.device(settings.device, rank) if settings.device == "cuda" else torch.device(settings.device)
        self._folder = Path(settings.folder)
        self._corpus = Corpus(Path(settings.corpus))
        held_out_D = is_held_out(self._corpus.prompt_hash_D, settings.validation)
        self._train_texts, self._validation_texts = np.flatnonzero(~held_out_D), np.flatnonzero(held_out_D)
        dtype = resolve_dtype(settings.dtype, self._device, reproducible=False)
        target = load_causal_lm(Path(settings.target), dtype, torch.device("cpu"))
        self._head = self._make_head(target)
        self._schedule = Schedule(settings.steps, settings.learning_rate, settings.warmup, settings.decay)
        state = checkpoints.load(self._folder, self._schedule.decay_from)
        self._scale_F = self._measure_scale() if state is None else state["scale"]
        self._head.fc.weight.data.mul_(self._scale_F)
        self._objective = Objective(
            Unroll(self._head, self._scale_F),
            target.get_output_embeddings().weight[self._head.d2t],
            columns=settings.columns,
            step_weight=settings.step_weight,
            acceptance_share=settings.acceptance_share,
        ).to(self._device)
        self._optimizers = make_optimizers(self._head)
        self._step, self._seconds = 0, 0.0
        if state is not None:
            self._head.load_state_dict(state["head"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self._step, self._seconds = state["step"], state["seconds"]

    def _make_head(self, target: PreTrainedModel) -> Eagle3Head:
        settings = self._settings
        if settings.init is not None:
            embedding = target.get_input_embeddings().weight
            head = load_eagle3(Path(settings.init), target_config=target.config, embedding=embedding, dtype=torch.float32, device="cpu")
            return head.requires_grad_(True)
        answers = (self._corpus.token(text)[self._corpus.answer_start_D[text] :] for text in self._train_texts.tolist())
        vocabulary_U = choose_vocabulary(answers, target.config.vocab_size, settings.vocab_size)
        config = make_config(
            target,
            draft_vocab_size=settings.vocab_size,
            intermediate_size=settings.intermediate_size,
            feature_layers=settings.feature_layers,
            max_tokens=settings.max_tokens,
        )
        return new_head(config, target, vocabulary_U)

    def _measure_scale(self) -> Tensor:
        """The spread of each feature channel, some of which are hundreds of times as large as others."""
        texts = self._train_texts[:_SCALE_TEXTS].tolist()
        features = [self._corpus.feature(text, int(self._corpus.length_D[text]))[1:].float() for text in texts]
        return torch.cat(features).std(0).clamp(min=1e-3)

    def run(self) -> None:
        """To the last step. State and log are written by the first worker."""
        settings = self._settings
        if self._rank == 0:
            checkpoints.cut_log(self._folder, self._step)
            if self._step == 0:
                self._validate()
        batches = Batches(
            self._corpus,
            self._train_texts,
            batch=max(1, settings.batch // self._world),
            queries=settings.queries,
            steps=settings.draft_steps,
            seed=settings.seed,
        )
        objective = self._share()
        saved_at = told_at = time.monotonic()
        sums = torch.zeros(())
        for batch in _ahead(batches.from_step(self._step, self._rank, self._world), settings.steps - self._step):
            began = time.monotonic()
            loss, step_sums = self._learn(objective, batch.to(self._device))
            self._step += 1
            now = time.monotonic()
            self._seconds += now - began
            if self._rank:
                continue
            sums = sums + step_sums.cpu()
            is_last = self._step == settings.steps
            if now - told_at > _LOG_S or is_last:
                checkpoints.append_log(self._folder, {**self._entry(), "loss": round(loss.item(), 4), **_rates(sums)})
                told_at, sums = now, torch.zeros(())
            if self._step % settings.validate_every == 0 or is_last:
                self._validate()
            if self._step == self._schedule.decay_from:
                self._save(checkpoints.LEVEL)
            if now - saved_at > settings.checkpoint_s or is_last:
                self._save(checkpoints.LAST)
                saved_at = now

    def _share(self) -> torch.nn.Module:
        """The objective, whose gradients are means over the workers."""
        if self._world == 1:
            return self._objective
        ids = [self._device.index] if self._device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(self._objective, device_ids=ids)

    def _learn(self, objective: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers):
            group["lr"] = self._schedule(self._step)
        loss, sums = objective(batch, self._settings.draft_steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), _MAX_NORM)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach(), sums

    @torch.no_grad()
    def _validate(self) -> None:
        """On windows that stay the same, spread over the held-out texts; more draft steps than are trained show how it fades."""
        batches = Batches(
            self._corpus, self._validation_texts, batch=_VALIDATION_BATCH, queries=_VALIDATION_QUERIES, steps=VALIDATION_STEPS, seed=0
        )
        chosen = batches.epoch(0)[:_VALIDATION_BATCHES]
        self._objective.eval()
        sums = sum(self._objective(batches.read(windows).to(self._device), VALIDATION_STEPS)[1] for windows in chosen)
        self._objective.train()
        checkpoints.append_log(self._folder, {**self._entry(), "validation": _rates(sums)})

    def _entry(self) -> dict[str, float]:
        return {"step": self._step, "seconds": round(self._seconds, 1)}

    def _save(self, name: str) -> None:
        state = {
            **self._entry(),
            "decay_from": self._schedule.decay_from,
            "scale": self._scale_F,
            "d2t": self._head.d2t.cpu(),
            "config": {**asdict(self._head.config), "head_dim": self._head.head_dim},
            "head": self._head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        checkpoints.save(self._folder, name, state)


def _rates(sums: Tensor) -> dict[str, list[float]]:
    """The metrics by draft step."""
    means = sums[:, :-1] / sums[:, -1:].clamp(min=1)
    return {name: [round(value, 4) for value in column] for name, column in zip(METRICS, means.T.tolist(), strict=True)}


def _ahead(batches: Iterator[Batch], number: int) -> Iterator[Batch]:
    """The first of them, each read while the one before is in use."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, batches)
        for _ in range(number):
            batch = coming.result()
            coming = pool.submit(next, batches)
            yield batch
