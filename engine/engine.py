"""The engine: requests in, results out, with continuous batching. DESIGN.md section 5 is its contract."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from engine.cycle import Decoder
from engine.drafting import Drafter
from engine.drafts.model import DraftModel
from engine.errors import EngineError, RowError, UserError
from engine.models.folder import check_eos
from engine.options import check_limits, check_reproducible, resolve_kv_cache_gib, resolve_max_batch, resolve_max_model_len
from engine.pair import Pair, find_pair
from engine.params import Request, Result, Speculation
from engine.prompting import prepare_row
from engine.row import Row
from engine.stopping import final_text
from engine.stopwatch import Watch
from engine.target import Target
from engine.topology import Topology

logger = logging.getLogger(__name__)


class Engine:
    """Lossless speculative decoding of many requests at once. Not thread-safe: one thread submits and steps.

    Args:
        target, draft: on one device; the target gives the features that the draft reads. `draft` None without speculation.
        tokenizer: None allows requests by token_ids only, whose results have no text.
        speculation: tree_size and depth None become 60 and 8. topology: for its method `static`.
        max_batch: slots. kv_cache_gib: bound on both caches, apart from the moment in which they are resized; a row waits while it does
            not fit.
        reproducible: run each row's cycle alone, so that its bits do not depend on its neighbours; fp32 only, slower.
        eos_token_ids: None becomes the target's; a model that names none, its tokenizer's.
        watch: is told where the time of each pass goes.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftModel | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        speculation: Speculation | None = None,
        topology: Topology | None = None,
        attention: str = "sdpa",
        max_batch: int = 16,
        max_model_len: int | None = None,
        kv_cache_gib: float | None = None,
        reproducible: bool = False,
        eos_token_ids: Iterable[int] | None = None,
        seed: int = 0,
        watch: Watch | None = None,
    ):
        speculation = speculation or Speculation()
        speculation.check()
        self.speculation = speculation.with_tree()
        if self.speculation.method != "off" and draft is None:
            raise UserError(f"speculation.method='{self.speculation.method}' needs a draft; allowed without one: off")
        if reproducible:
            check_reproducible(target.dtype)
            if self.speculation.budget == "auto":
                logger.warning("speculation.budget is fixed: with engine.reproducible=true no clock may change a text")
                self.speculation = dataclasses.replace(self.speculation, budget="fixed")
        eos_ids = _choose_eos(target, tokenizer) if eos_token_ids is None else tuple(eos_token_ids)
        check_eos(list(eos_ids), target.vocab_size, "the model")
        drafts = self.speculation.method != "off" and self.speculation.tree_size > 1
        drafter = None
        if drafts:
            drafter = Drafter(
                draft, self.speculation, num_target_tokens=target.vocab_size, device=target.device, topology=self._nodes(topology)
            )
        self.decoder = Decoder(target, drafter, self.speculation, attention=attention, tokenizer=tokenizer, watch=watch)
        self._target, self.tokenizer = target, tokenizer
        self.draft_trained_length = draft.trained_length if drafter else None
        self.max_batch = max_batch
        self.max_model_len = resolve_max_model_len(max_model_len, target.length_limit)
        #: places (slots * capacity) of both caches at most
        self._max_places = None if kv_cache_gib is None else int(kv_cache_gib * 2**30 / self.decoder.bytes_per_token)
        self._reproducible = reproducible
        self._eos_ids = eos_ids
        self._seed = seed
        self._queue: deque[Row] = deque()
        self.running: list[Row] = []
        self._refused: list[Result] = []
        self._num_submitted = 0

    def _nodes(self, topology: Topology | None) -> Sequence[tuple[int, ...]]:
        """The shape of static trees; none for the other methods."""
        speculation = self.speculation
        if speculation.method != "static":
            return ()
        if topology is None:
            raise UserError("speculation.method='static' needs a topology")
        return topology.first(speculation.tree_size - 1, speculation.depth)

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
        if not isinstance(speculation, Speculation):
            raise UserError(f"speculation={speculation!r}; allowed: a Speculation, or None")
        speculation.check()
        check_limits(max_batch=max_batch, max_model_len=max_model_len, kv_cache_gib=kv_cache_gib, seed=seed)
        found = find_pair(
            target,
            draft,
            method=speculation.method,
            revision=revision,
            dtype=dtype,
            device=device,
            attention=attention,
            max_model_len=max_model_len,
            reproducible=reproducible,
        )
        found.settle(speculation)  # what it refuses is refused before anything is loaded
        return cls.over(
            found.load(),
            speculation=speculation,
            max_batch=max_batch,
            max_model_len=max_model_len,
            kv_cache_gib=kv_cache_gib,
            reproducible=reproducible,
            seed=seed,
        )

    @classmethod
    def over(
        cls,
        pair: Pair,
        *,
        speculation: Speculation,
        max_batch: int | str = "auto",
        max_model_len: int | None = None,
        kv_cache_gib: float | str = "auto",
        reproducible: bool = False,
        seed: int = 0,
        watch: Watch | None = None,
    ) -> Engine:
        """An engine with caches of its own over weights that are loaded. Without speculation the target gives no features.

        Arguments as of `load`. Raises UserError for a topology that cannot be had, and for a method that drafts where there is no draft.
        """
        speculation, topology = pair.found.settle(speculation)
        device, is_plain = pair.found.device, speculation.method == "off"
        return cls(
            pair.target.without_features() if is_plain else pair.target,
            None if is_plain or pair.make_draft is None else pair.make_draft(),
            pair.tokenizer,
            speculation=speculation,
            topology=topology,
            attention=pair.found.attention,
            max_batch=resolve_max_batch(max_batch, device),
            max_model_len=max_model_len,
            kv_cache_gib=resolve_kv_cache_gib(kv_cache_gib, device),
            reproducible=reproducible,
            seed=seed,
            watch=watch,
        )

    @property
    def dtype(self) -> str:
        return str(self._target.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(self._target.device)

    @property
    def attention(self) -> str:
        """The name of the backend, as `auto` has found it."""
        return self.decoder.attention

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self.running or self._refused)

    def submit(self, request: Request) -> None:
        """Queue a request. A bad one comes back from `step` as a result with finish_reason "error".

        A request without an id gets the number of requests submitted before it. That ids do not repeat is for the caller to see to.
        """
        request = dataclasses.replace(request, id=str(self._num_submitted if request.id is None else request.id))
        self._num_submitted += 1
        try:
            row = prepare_row(
                request,
                tokenizer=self.tokenizer,
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
        try:
            self._admit()
        except torch.OutOfMemoryError as error:
            hint = "lower engine.max_batch or engine.kv_cache_gib"
            raise EngineError(f"out of memory for the caches of new rows; {hint} ({error})") from error
        if not self.running:
            return results
        try:
            if self._reproducible:
                for row in self.running:
                    self.decoder.run([row])
            else:
                self.decoder.run(self.running)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"out of memory with {len(self.running)} rows; lower engine.max_batch ({error})") from error
        now = time.perf_counter()
        finished = [row for row in self.running if row.finish_reason is not None]
        self.running = [row for row in self.running if row.finish_reason is None]
        return results + [row.result(final_text(row, self.tokenizer), now - row.started) for row in finished]

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """The results of all requests, in their order."""
        place = {}
        numbered = list(_numbered(requests))
        for index, request in enumerate(numbered):
            place.setdefault(_key(request), []).append(index)
        results: list[Result | None] = [None] * len(numbered)
        for result in self.stream(numbered):
            indices = place[_key(result)]
            # of a repeated key the first is generated, and the later ones come back as errors
            is_repeat = result.error is not None and result.error.type == "repeated_id"
            results[indices.pop() if is_repeat else indices.pop(0)] = result
        return results

    def stream(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results as rows end. Requests are taken up as slots need them, so the iterable may be longer than memory.

        Where the caller stops listening, the rows that have not ended are dropped. Raises RuntimeError while the engine has other work,
        whose results would be mixed up with these.
        """
        self._require_idle()
        return self._stream(requests)

    def _stream(self, requests: Iterable[Request]) -> Iterator[Result]:
        self._require_idle()
        seen: set[tuple[str, str]] = set()
        source = iter(_numbered(requests))
        exhausted = False
        try:
            while not exhausted or self.has_work:
                while not exhausted and len(self._queue) + len(self._refused) < self.max_batch:
                    request = next(source, None)
                    if request is None:
                        exhausted = True
                    elif _key(request) in seen:
                        error = RowError("repeated_id", f"id {request.id!r} with sample {request.sample} came before")
                        yield _error_result(request, error, self._seed)
                    else:
                        seen.add(_key(request))
                        self.submit(request)
                yield from self.step()
        finally:
            self._queue.clear()
            self.running.clear()
            self._refused.clear()

    def _require_idle(self) -> None:
        if self.has_work:
            raise RuntimeError("the engine has work already: run `step` until it has none, or read the other stream to its end")

    def _check_fits(self, row: Row) -> None:
        needed = self.decoder.capacity(row)
        if self._max_places is not None and needed > self._max_places:
            needed, allowed = (_show_bytes(places * self.decoder.bytes_per_token) for places in (needed, self._max_places))
            raise RowError("out_of_memory", f"the row's cache needs {needed}; allowed: {allowed} (engine.kv_cache_gib)")

    def _admit(self) -> None:
        """Fill free slots from the queue, and close the gaps: the running rows hold slots 0, 1, 2, ..."""
        waiting: list[Row] = []
        capacity = max((self.decoder.capacity(row) for row in self.running), default=0)
        while self._queue and len(self.running) + len(waiting) < self.max_batch:
            wider = max(capacity, self.decoder.capacity(self._queue[0]))
            if self._max_places is not None and wider * (len(self.running) + len(waiting) + 1) > self._max_places:
                break
            capacity = wider
            waiting.append(self._queue.popleft())
        num_slots = len(self.running) + len(waiting)
        taken = {row.slot for row in self.running}
        free = [slot for slot in range(num_slots) if slot not in taken]
        for row in self.running:
            if row.slot >= num_slots:
                self.decoder.move_row(row, free.pop())
        for row, slot in zip(waiting, free, strict=True):
            row.slot = slot
        self.decoder.reserve(num_slots, capacity, self._max_places)
        self.running = sorted(self.running + waiting, key=lambda row: row.slot)


def _choose_eos(target: Target, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """The target's EOS ids. They are those at which transformers' generate ends; where there are none the tokenizer's is taken, since
    otherwise every text would run on to max_tokens."""
    if target.eos_token_ids or tokenizer is None or tokenizer.eos_token_id is None:
        return target.eos_token_ids
    return (tokenizer.eos_token_id,) if tokenizer.eos_token_id < target.vocab_size else ()


def _show_bytes(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.2f} MiB"


def _numbered(requests: Iterable[Request]) -> Iterator[Request]:
    """Requests whose ids are strings, as in the pipeline's rows; a missing id is the request's index."""
    for index, request in enumerate(requests):
        yield dataclasses.replace(request, id=str(index if request.id is None else request.id))


def _key(item: Request | Result) -> tuple[str, str]:
    """(id, sample), hashable whatever a bad request has in their place."""
    return item.id, repr(item.sample)


def _error_result(request: Request, error: RowError, engine_seed: int) -> Result:
    seed = getattr(request.params, "seed", None)
    seed = seed if isinstance(seed, int) and abs(seed) < 2**63 else engine_seed  # the request may be bad in this very field
    known = {"prompt": request.prompt, "seed": seed, "num_prompt_tokens": error.num_prompt_tokens}
    return Result.failed(request.id, request.sample, error, **known)
