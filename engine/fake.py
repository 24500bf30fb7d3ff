"""An engine without a model: instant, deterministic, able to fail on command. The pipeline is tested with it (`engine.kind=fake`).

A row's tokens depend on (seed, id, sample, prompt) only. Markers in the prompt steer it:

    [[fake:tokens=200]]   natural length in tokens        [[fake:row_error]]   this row fails
    [[fake:slow=2.0]]     finishes that many seconds late [[fake:raise]]       the engine raises
    [[fake:template]]     the chat template refuses it    [[fake:kill]]        the process dies
    [[fake:broken_until=1764460800]]   this row fails before that time, in seconds since 1970
The target `fake-broken` cannot be loaded.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from engine.errors import EngineError, RowError
from engine.params import Cycle, Request, Result, SamplingParams, Speculation

EOS = 0
_TEXT = (
    "<eos> the a river stone bird light carries slow quiet over under morning evening water field and then while near far "
    "bright cold warm small wide open road hill house tree leaf wind rain snow cloud sun moon star sea boat sail harbour"
)
WORDS = tuple(_TEXT.split())

_MARKER = re.compile(r"\[\[fake:(\w+)(?:=([\d.]+))?\]\]")
_AUTO_SLOTS = 16


@dataclass
class _Row:
    """A request that holds a slot."""

    request: Request
    prompt: str
    params: SamplingParams
    seed: int
    plan: list[int]
    num_prompt_tokens: int
    ready_at: float
    started_at: float
    draw: random.Random
    num_done: int = 0
    cycles: list[Cycle] = field(default_factory=list)


class FakeEngine:
    """The interface of `engine.Engine` over a table of words."""

    has_chat_template = True
    draft_trained_length = None
    dtype = "none"
    device = "cpu"
    attention = "none"

    def __init__(self, *, speculation: Speculation, max_batch: int, max_model_len: int, seed: int):
        self.speculation = speculation
        self.max_batch = max_batch
        self.max_model_len = max_model_len
        self._seed = seed
        self._queue: deque[Request] = deque()
        self._running: list[_Row] = []
        self._failed: list[Result] = []
        self._num_submitted = 0

    @classmethod
    def load(
        cls,
        target: str,
        draft: str = "auto",
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        attention: str = "auto",
        speculation: Speculation | None = None,
        max_batch: str | int = "auto",
        max_model_len: int | None = None,
        kv_cache_gib: str | float = "auto",
        reproducible: bool = False,
        seed: int = 0,
    ) -> FakeEngine:
        """Raises EngineError for the target `fake-broken`. What only a real model needs is taken and has no effect."""
        if target == "fake-broken":
            raise EngineError("the fake engine was told not to load (model.target=fake-broken)")
        spec = speculation or Speculation()
        spec.check()
        spec = spec.with_tree()
        slots = _AUTO_SLOTS if max_batch == "auto" else int(max_batch)
        return cls(speculation=spec, max_batch=slots, max_model_len=max_model_len or 8192, seed=seed)

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._running or self._failed)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request: Request) -> None:
        if request.id is None:
            request = replace(request, id=str(self._num_submitted))
        self._num_submitted += 1
        self._queue.append(request)

    def step(self) -> list[Result]:
        """One cycle. Raises EngineError for a row marked `[[fake:raise]]`, and ends the process for `[[fake:kill]]`."""
        while self._queue and len(self._running) < self.max_batch:
            self._admit(self._queue.popleft())
        finished, self._failed = self._failed, []
        batch_size = len(self._running)
        waiting = batch_size > 0
        for row in list(self._running):
            if time.monotonic() < row.ready_at:
                continue
            waiting = False
            self._advance(row, batch_size)
            if row.num_done == len(row.plan):
                self._running.remove(row)
                finished.append(_finish(row))
        if waiting and not finished:
            time.sleep(0.005)
        return finished

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """The results in the order of the requests."""
        requests = [replace(r, id=str(i)) if r.id is None else r for i, r in enumerate(requests)]
        place = {(r.id, r.sample): i for i, r in enumerate(requests)}
        return sorted(self.stream(requests), key=lambda result: place[result.id, result.sample])

    def stream(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results as they finish; requests are taken as slots get free."""
        source = iter(requests)
        more = True
        while more or self.has_work:
            while more and self.num_queued < self.max_batch:
                request = next(source, None)
                if request is None:
                    more = False
                else:
                    self.submit(request)
            yield from self.step()

    def _admit(self, request: Request) -> None:
        prompt, num_prompt_tokens, seed = request.prompt, 0, self._seed
        try:
            params = request.params or SamplingParams()
            params.check(vocab_size=len(WORDS))
            seed = self._seed if params.seed is None else params.seed
            prompt = _render(request)
            num_prompt_tokens = len(prompt.split())
            if num_prompt_tokens >= self.max_model_len:
                raise RowError("prompt_too_long", f"{num_prompt_tokens} tokens; allowed: fewer than {self.max_model_len}")
            marks = dict(_MARKER.findall(prompt))
            if "row_error" in marks or time.time() < float(marks.get("broken_until") or 0):
                raise RowError("fake_error", "the prompt asked for it")
        except RowError as error:
            known = {"prompt": prompt, "seed": seed, "num_prompt_tokens": num_prompt_tokens}
            self._failed.append(Result.failed(request.id, request.sample, error, **known))
            return
        if "kill" in marks:
            os._exit(137)
        if "raise" in marks:
            raise EngineError("the fake engine was told to fail by a prompt")
        key = f"{seed}\0{request.id}\0{request.sample}\0{prompt}".encode("utf-8", "surrogatepass")
        draw = random.Random(hashlib.blake2b(key, digest_size=8).digest())
        length = int(float(marks["tokens"])) if marks.get("tokens") else draw.randint(4, 40)
        plan = [draw.randrange(1, len(WORDS)) for _ in range(length - 1)] + [EOS]
        now = time.monotonic()
        self._running.append(
            _Row(
                request=request, prompt=prompt, params=params, seed=seed, plan=plan[: params.max_tokens],
                num_prompt_tokens=num_prompt_tokens, ready_at=now + float(marks.get("slow") or 0), started_at=now, draw=draw,
            )
        )  # fmt: skip

    def _advance(self, row: _Row, batch_size: int) -> None:
        """The first call is the prefill and its token; every later one is a cycle."""
        if row.num_done == 0:
            row.num_done = 1
            return
        drafted = accepted = depth = 0
        if self.speculation.method != "off":
            drafted, depth = self.speculation.tree_size - 1, min(self.speculation.depth, self.speculation.tree_size - 1)
            accepted = row.draw.randint(0, min(depth, 4))
        emitted = min(accepted + 1, len(row.plan) - row.num_done)
        row.num_done += emitted
        row.cycles.append(
            Cycle(
                drafted=drafted, accepted=accepted, emitted=emitted, depth=depth, sampled_nodes=drafted // 10,
                sampled_accepted=min(accepted, drafted // 10), batch_size=batch_size,
            )
        )  # fmt: skip


def _render(request: Request) -> str:
    """The prompt's text; messages through a template of one line per turn."""
    if request.messages is None:
        return request.prompt or ""
    text = "".join(f"<|{message['role']}|>\n{message.get('content') or ''}\n" for message in request.messages)
    if "[[fake:template]]" in text:
        raise RowError("template_error", "the chat template refused the messages")
    return text + "<|assistant|>\n"


def _finish(row: _Row) -> Result:
    stopped = row.plan[-1] == EOS
    words = [WORDS[token] for token in row.plan if token != EOS]
    return Result(
        id=row.request.id, sample=row.request.sample, prompt=row.prompt, token_ids=list(row.plan), text=" ".join(words),
        finish_reason="stop" if stopped else "length", num_prompt_tokens=row.num_prompt_tokens, seed=row.seed,
        logprobs=[-1.5] * len(row.plan) if row.params.logprobs else None, cycles=row.cycles,
        latency_s=time.monotonic() - row.started_at,
    )  # fmt: skip
