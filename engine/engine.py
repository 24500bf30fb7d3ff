"""The engine: requests in, results out, with continuous batching. DESIGN.md section 5 is its contract."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from engine.attention import BACKENDS
from engine.cycle import Decoder
from engine.drafting import Drafter
from engine.errors import EngineError, RowError, UserError, unknown_name
from engine.models.checkpoint import load_eagle3
from engine.models.eagle3 import Eagle3Head
from engine.models.loading import load_causal_lm, load_tokenizer
from engine.models.source import resolve_draft, resolve_target
from engine.params import Request, Result, Speculation
from engine.prompting import prepare_row
from engine.row import Row
from engine.stopping import final_text
from engine.target import Target

DEFAULT_TREE_SIZE, DEFAULT_DEPTH = 60, 8
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Engine:
    """Lossless speculative decoding of many requests at once. Not thread-safe: one thread submits and steps.

    Args:
        target, head: the models, on one device; `head` None without speculation.
        tokenizer: None allows requests by token_ids only, whose results have no text.
        speculation: tree_size and depth None become 60 and 8.
        max_batch: slots. kv_cache_gib: bound on both caches; a row waits while it does not fit.
        reproducible: run each row's cycle alone, so that its bits do not depend on its neighbours; fp32 only, slower.
    """

    def __init__(
        self,
        target: Target,
        head: Eagle3Head | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        speculation: Speculation | None = None,
        attention: str = "sdpa",
        max_batch: int = 16,
        max_model_len: int | None = None,
        kv_cache_gib: float | None = None,
        reproducible: bool = False,
        eos_token_ids: Iterable[int] | None = None,
        seed: int = 0,
    ):
        speculation = speculation or Speculation()
        speculation.check()
        self.speculation = dataclasses.replace(
            speculation,
            tree_size=DEFAULT_TREE_SIZE if speculation.tree_size is None else speculation.tree_size,
            depth=DEFAULT_DEPTH if speculation.depth is None else speculation.depth,
        )
        if self.speculation.method != "off" and head is None:
            raise UserError(f"speculation.method='{self.speculation.method}' needs a draft; allowed without one: off")
        if reproducible and target.dtype != torch.float32:
            raise UserError(f"engine.reproducible=true with model.dtype={str(target.dtype).removeprefix('torch.')}; allowed: float32")
        drafts = self.speculation.method != "off" and self.speculation.tree_size > 1
        drafter = None
        if drafts:
            drafter = Drafter(head, self.speculation, num_target_tokens=target.vocab_size, attention=attention)
        self.decoder = Decoder(target, drafter, self.speculation, attention=attention, tokenizer=tokenizer)
        self._target, self._tokenizer = target, tokenizer
        self.max_batch = max_batch
        limit = target.config.max_position_embeddings
        self.max_model_len = limit if max_model_len is None else max_model_len
        if self.max_model_len > limit:
            raise UserError(f"model.max_model_len={max_model_len}; allowed: up to the model's {limit}")
        self._max_cache_bytes = None if kv_cache_gib is None else int(kv_cache_gib * 2**30)
        self._reproducible = reproducible
        self._eos_ids = tuple(_eos_token_ids(target) if eos_token_ids is None else eos_token_ids)
        self._seed = seed
        self._queue: deque[Row] = deque()
        self._running: list[Row] = []
        self._refused: list[Result] = []

    @classmethod
    def load(
        cls,
        target: str | Path,
        draft: str | Path = "auto",
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        attention: str = "auto",
        speculation: Speculation | None = None,
        max_batch: int | str = "auto",
        max_model_len: int | None = None,
        kv_cache_gib: float | str = "auto",
        reproducible: bool = False,
        seed: int = 0,
    ) -> Engine:
        """Load a target and its draft by name or folder; every "auto" is resolved here.

        Raises UserError before anything is loaded where a name or an option is wrong, and while loading where a checkpoint is.
        """
        speculation = speculation or Speculation()
        speculation.check()
        torch_device = _resolve_device(device)
        torch_dtype = _resolve_dtype(dtype, torch_device, reproducible)
        attention = _resolve_attention(attention)
        resolved = resolve_target(str(target), revision)
        draft_path = resolve_draft(str(draft), resolved.preset, speculation.method)
        if resolved.preset is not None:
            speculation = dataclasses.replace(
                speculation,
                tree_size=speculation.tree_size or resolved.preset.tree_size,
                depth=speculation.depth or resolved.preset.depth,
            )
        model = load_causal_lm(resolved.path, torch_dtype, torch_device)
        head = None
        if draft_path is not None:
            head = load_eagle3(
                draft_path,
                target_config=model.config,
                embedding=model.get_input_embeddings().weight,
                dtype=torch_dtype,
                device=torch_device,
            )
        return cls(
            Target(model, head.feature_layers if head else ()),
            head,
            load_tokenizer(resolved.path),
            speculation=speculation,
            attention=attention,
            max_batch=_resolve_max_batch(max_batch, torch_device),
            max_model_len=max_model_len,
            kv_cache_gib=None if kv_cache_gib == "auto" else kv_cache_gib,
            reproducible=reproducible,
            seed=seed,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer is not None and bool(self._tokenizer.chat_template)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._running or self._refused)

    def submit(self, request: Request) -> None:
        """Queue a request. A bad one comes back from `step` as a result with finish_reason "error"."""
        try:
            row = prepare_row(
                request,
                tokenizer=self._tokenizer,
                vocab_size=self._target.vocab_size,
                max_model_len=self.max_model_len,
                eos_ids=self._eos_ids,
                engine_seed=self._seed,
            )
            self._check_fits(row)
        except RowError as error:
            self._refused.append(_error_result(request, error, self._seed))
        else:
            self._queue.append(row)

    def step(self) -> list[Result]:
        """One cycle of the running batch, refilled first; the results of rows that ended.

        Raises EngineError when the device runs out of memory.
        """
        results, self._refused = self._refused, []
        self._admit()
        if not self._running:
            return results
        try:
            if self._reproducible:
                for row in self._running:
                    self.decoder.run([row])
            else:
                self.decoder.run(self._running)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"out of memory with {len(self._running)} rows; lower engine.max_batch ({error})") from error
        now = time.perf_counter()
        finished = [row for row in self._running if row.finish_reason is not None]
        self._running = [row for row in self._running if row.finish_reason is None]
        return results + [row.result(final_text(row, self._tokenizer), now - row.started) for row in finished]

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """The results of all requests, in their order."""
        place = {}
        numbered = list(_numbered(requests))
        for index, request in enumerate(numbered):
            place.setdefault((request.id, request.sample), []).append(index)
        results: list[Result | None] = [None] * len(numbered)
        for result in self.stream(numbered):
            indices = place[result.id, result.sample]
            # of a repeated key the first is generated, and the later ones come back as errors
            is_repeat = result.error is not None and result.error.type == "repeated_id"
            results[indices.pop() if is_repeat else indices.pop(0)] = result
        return results

    def stream(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results as rows end. Requests are taken up as slots need them, so the iterable may be longer than memory."""
        seen: set[tuple[str, int]] = set()
        source = iter(_numbered(requests))
        exhausted = False
        while not exhausted or self.has_work:
            while not exhausted and len(self._queue) < self.max_batch:
                request = next(source, None)
                if request is None:
                    exhausted = True
                elif (request.id, request.sample) in seen:
                    error = RowError("repeated_id", f"id {request.id!r} with sample {request.sample} came before")
                    yield _error_result(request, error, self._seed)
                else:
                    seen.add((request.id, request.sample))
                    self.submit(request)
            yield from self.step()

    def _check_fits(self, row: Row) -> None:
        if self._max_cache_bytes is None:
            return
        needed = self.decoder.capacity(row) * self.decoder.bytes_per_token
        if needed > self._max_cache_bytes:
            gib = self._max_cache_bytes / 2**30
            raise RowError("out_of_memory", f"the row's cache needs {needed / 2**30:.2f} GiB; allowed: {gib:.2f} (engine.kv_cache_gib)")

    def _admit(self) -> None:
        """Fill free slots from the queue, then close the gaps: the running rows hold slots 0, 1, 2, ..."""
        waiting: list[Row] = []
        capacity = max((self.decoder.capacity(row) for row in self._running), default=0)
        while self._queue and len(self._running) + len(waiting) < self.max_batch:
            wider = max(capacity, self.decoder.capacity(self._queue[0]))
            num_slots = len(self._running) + len(waiting) + 1
            fits = self._max_cache_bytes is None or wider * num_slots * self.decoder.bytes_per_token <= self._max_cache_bytes
            if not fits and num_slots > 1:
                break
            capacity = wider
            waiting.append(self._queue.popleft())
        num_slots = len(self._running) + len(waiting)
        self.decoder.reserve(num_slots, capacity)
        taken = {row.slot for row in self._running}
        free = [slot for slot in range(num_slots) if slot not in taken]
        for row in waiting:
            row.slot = free.pop()
        for row in sorted(self._running, key=lambda row: -row.slot):
            if row.slot >= num_slots:
                self.decoder.move_row(row, free.pop())
        self._running = sorted(self._running + waiting, key=lambda row: row.slot)


def _numbered(requests: Iterable[Request]) -> Iterator[Request]:
    for index, request in enumerate(requests):
        yield dataclasses.replace(request, id=str(index)) if request.id is None else request


def _error_result(request: Request, error: RowError, engine_seed: int) -> Result:
    seed = request.params.seed if isinstance(getattr(request.params, "seed", None), int) else engine_seed
    return Result(
        id=request.id,
        sample=request.sample,
        prompt=request.prompt,
        token_ids=None,
        text=None,
        finish_reason="error",
        error=error,
        seed=seed,
    )


def _eos_token_ids(target: Target) -> tuple[int, ...]:
    eos = target.config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)


def _resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UserError(unknown_name("model.device", device, ["auto", "cpu", "cuda"]))
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"model.device='{device}', but torch {torch.__version__} sees no GPU here; allowed: auto, cpu")
    return torch.device(device)


def _resolve_dtype(dtype: str, device: torch.device, reproducible: bool) -> torch.dtype:
    if dtype == "auto":
        if reproducible:
            return torch.float32
        fast_bfloat16 = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if fast_bfloat16 else torch.float32
    if dtype not in _DTYPES:
        raise UserError(unknown_name("model.dtype", dtype, ["auto", *_DTYPES]))
    return _DTYPES[dtype]


def _resolve_attention(attention: str) -> str:
    if attention == "auto":
        return "sdpa"
    if attention not in BACKENDS:
        raise UserError(f"{unknown_name('model.attention', attention, ['auto', *BACKENDS])}; flash and flex are not built yet")
    return attention


def _resolve_max_batch(max_batch: int | str, device: torch.device) -> int:
    if max_batch == "auto":
        return 16 if device.type == "cpu" else 64
    if not isinstance(max_batch, int) or max_batch < 1:
        raise UserError(f"engine.max_batch={max_batch!r}; allowed: auto, or an integer >= 1")
    return max_batch
