"""The state of one request in the engine: few stored values, everything else derived."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from engine.errors import RowError
from engine.params import Cycle, Request, Result, SamplingParams


@dataclass(slots=True, kw_only=True)
class Row:
    """A request that holds, or waits for, a slot.

    key: of its randomness. tokens: the prompt's and the output's ids. max_tokens: output tokens at most, the model's length included.
    num_cached: tokens whose keys and values the target's cache holds; the last token is never among them.
    num_draft_cached: places of the draft's cache that hold the row's text: tokens, or an EAGLE head's (token, feature) pairs.
    pending_TF: features whose pairs an EAGLE head does not hold yet.
    takes_plain_step: the next cycle drafts nothing.
    num_cycles: the cycle counter of the draft's keys.
    """

    request: Request
    params: SamplingParams
    seed: int
    key: int
    prompt: str | None
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    stop_ids: frozenset[int]
    started: float
    slot: int = -1
    num_cached: int = 0
    num_draft_cached: int = 0
    pending_TF: Tensor | None = None
    takes_plain_step: bool = False
    num_cycles: int = 0
    cycles: list[Cycle] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    seen_V: Tensor | None = None
    bias_V: Tensor | None = None
    finish_reason: str | None = None
    error: RowError | None = None

    @property
    def is_prefilled(self) -> bool:
        return self.num_cached >= self.num_prompt_tokens

    @property
    def drafts(self) -> bool:
        return self.is_prefilled and not self.takes_plain_step

    @property
    def num_pending(self) -> int:
        """Features that the draft has not read."""
        return 0 if self.pending_TF is None else len(self.pending_TF)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def result(self, text: str, latency_s: float) -> Result:
        assert self.finish_reason is not None, "only a finished row has a result"
        known = {"prompt": self.prompt, "seed": self.seed, "num_prompt_tokens": self.num_prompt_tokens, "latency_s": latency_s}
        if self.error is not None:
            return Result.failed(self.request.id, self.request.sample, self.error, **known)
        return Result(
            id=self.request.id,
            sample=self.request.sample,
            token_ids=self.output,
            text=text,
            finish_reason=self.finish_reason,
            logprobs=self.logprobs if self.params.logprobs else None,
            cycles=self.cycles,
            **known,
        )
