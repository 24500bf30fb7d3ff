"""What a caller hands to an engine and gets back: plain data, no torch.

Field names are those of the configuration (`sampling:` and `speculation:`), so a config section is one of these classes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.errors import RowError, UserError, unknown_name

METHODS = ("rheo", "coupled", "topk", "static", "chain", "off")
BUDGETS = ("fixed", "auto")
ORDERS = ("stochastic_first", "deterministic_first")

#: of messages; which follow which, a chat template decides
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

#: methods whose output tokens are drawn as argmax(log p + noise): the same seed gives the same text with each of them
COUPLED_DRAW_METHODS = ("coupled", "topk", "off")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one row is sampled. Filters act on the target's law p only, in this order (LAW.md 2.3):

    logit_bias: added to the logits, by token id.
    repetition_penalty: positive logits of tokens seen in the prompt, the output or the node's path are divided by it, negative ones
        multiplied (1.0: none).
    min_tokens: until then stop ids and EOS cannot be drawn, and stop strings are not looked for.
    temperature: 0 is greedy.
    top_k, top_p, min_p, eta: truncations, off at 0, 1.0, 0.0 and 0.0; `eta` keeps p >= min(eta, sqrt(eta) * exp(-entropy)).
    max_tokens: output tokens at most.
    stop, stop_token_ids: strings, and token ids, that end the row.
    ignore_eos: EOS is an ordinary token.
    seed: over the engine's.
    logprobs: return each token's log-probability under the raw model at T=1, unfiltered.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    eta: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int = 256
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: bool = False

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], defaults: SamplingParams | None = None) -> SamplingParams:
        """`defaults` with `values` over it, checked.

        Raises RowError("bad_params") for an unknown key, a wrong type or a value out of range.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                raise RowError("bad_params", unknown_name("sampling parameter", key, names))
        values = dict(values)
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):  # JSON and YAML keys are strings
            try:
                values["logit_bias"] = {int(str(token)): value for token, value in bias.items()}
            except ValueError:
                raise RowError("bad_params", f"logit_bias has a key that is no token id: {list(bias)[:5]}") from None
        params = dataclasses.replace(defaults or cls(), **values)
        params.check()
        return params

    def check(self, vocab_size: int | None = None) -> None:
        """Raises RowError("bad_params") with the value and what is allowed; `vocab_size` also bounds the token ids."""
        for name, is_valid, allowed in _SAMPLING_RULES:
            value = getattr(self, name)
            if not is_valid(value):
                raise RowError("bad_params", f"{name}={value!r}; allowed: {allowed}")
        if self.min_tokens > self.max_tokens:
            raise RowError("bad_params", f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if vocab_size is not None:
            for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
                outside = [token for token in ids if not 0 <= token < vocab_size]
                if outside:
                    raise RowError("bad_params", f"{name} has token ids {outside[:5]}; allowed: 0 to {vocab_size - 1}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # by comparison: math.isfinite cannot take an integer beyond a float's range
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_list(value: Any, is_item) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(is_item(item) for item in value)


_SAMPLING_RULES = (
    ("temperature", lambda v: _is_number(v) and v >= 0, "a number >= 0"),
    ("top_p", lambda v: _is_number(v) and 0 < v <= 1, "a number in (0, 1]"),
    ("top_k", lambda v: _is_int(v) and v >= 0, "an integer >= 0 (0: off)"),
    ("min_p", lambda v: _is_number(v) and 0 <= v <= 1, "a number in [0, 1]"),
    ("eta", lambda v: _is_number(v) and 0 <= v <= 1, "a number in [0, 1]"),
    ("repetition_penalty", lambda v: _is_number(v) and v > 0, "a number > 0 (1.0: off)"),
    (
        "logit_bias",
        lambda v: isinstance(v, Mapping) and all(_is_int(k) and _is_number(x) for k, x in v.items()),
        "a map from token id to a finite number",
    ),
    ("max_tokens", lambda v: _is_int(v) and v >= 1, "an integer >= 1"),
    ("min_tokens", lambda v: _is_int(v) and v >= 0, "an integer >= 0"),
    ("stop", lambda v: _is_list(v, lambda s: isinstance(s, str) and s != ""), "a list of non-empty strings"),
    ("stop_token_ids", lambda v: _is_list(v, _is_int), "a list of token ids"),
    ("ignore_eos", lambda v: isinstance(v, bool), "true or false"),
    ("seed", lambda v: v is None or (_is_int(v) and -(2**63) <= v < 2**63), "a 64-bit integer"),
    ("logprobs", lambda v: isinstance(v, bool), "true or false"),
)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How a drafted tree is verified. `order` is the paper's ablation and acts on `rheo` only: the sampled child is tried before the
    deterministic ones (RheoVerification), or after them (RRSw)."""

    rule: str = "lossless"
    order: str = "stochastic_first"


#: options of Speculation that act on some methods only
_ACTS_ON = {"m": ("rheo",), "draft_top": ("rheo", "static", "chain")}

#: values of theirs that say what is so in any case
_SAYS_THE_SAME = {("m", "chain"): 0, ("draft_top", "topk"): 0, ("draft_top", "coupled"): 0}


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How trees are drafted and verified.

    tree_size counts the root (60 = root + 59 drafted tokens), depth counts draft levels; None: the preset's, else 60 and 8.
    top_k: candidate slots of a node, and the width of the beam. m: lead tokens of a node (`rheo`).
    draft_top: the draft's law keeps this many tokens (`rheo`, `static`, `chain`); 0 keeps all.
    budget: "fixed" drafts trees of tree_size and depth in every cycle; with "auto" these are limits, and the engine chooses below them,
        down to no tree, for the most tokens per second.
    topology: of `static` trees: "auto" (the preset's), or a file; its first tree_size - 1 nodes within depth are used.
    """

    method: str = "rheo"
    tree_size: int | None = None
    depth: int | None = None
    top_k: int = 10
    m: int = 1
    draft_top: int = 128
    topology: str = "auto"
    verification: Verification = field(default_factory=Verification)
    budget: str = "fixed"

    def with_tree(self, tree_size: int = 60, depth: int = 8) -> Speculation:
        """With these in place of a tree_size and depth that are None."""
        return dataclasses.replace(
            self,
            tree_size=tree_size if self.tree_size is None else self.tree_size,
            depth=depth if self.depth is None else self.depth,
        )

    def check(self) -> None:
        """Raises UserError with the field, the value and what is allowed."""

        def refuse(name: str, value: object, allowed: str) -> None:
            raise UserError(f"speculation.{name}={value!r}; allowed: {allowed}")

        if self.method not in METHODS:
            raise UserError(unknown_name("speculation.method", self.method, METHODS))
        for name, least in (("tree_size", 1), ("depth", 1), ("top_k", 1), ("m", 0), ("draft_top", 0)):
            value = getattr(self, name)
            if value is None and name in ("tree_size", "depth"):
                continue
            if not _is_int(value) or value < least:
                refuse(name, value, f"an integer >= {least}")
        if not isinstance(self.verification, Verification):
            refuse("verification", self.verification, "a Verification(rule, order)")
        if not isinstance(self.topology, str):
            refuse("topology", self.topology, "auto, or a path")
        if self.topology != "auto" and self.method != "static":
            refuse("topology", self.topology, f"auto with method={self.method}")
        for name, methods in _ACTS_ON.items():
            value = getattr(self, name)
            if self.method not in methods and value not in (getattr(Speculation, name), _SAYS_THE_SAME.get((name, self.method))):
                refuse(name, value, f"{getattr(Speculation, name)} (not set) with method={self.method}, on which it has no effect")
        if self.method == "rheo" and self.m > self.top_k - 1:
            refuse("m", self.m, f"0 to top_k-1 = {self.top_k - 1}")
        if self.verification.rule != "lossless":
            refuse("verification.rule", self.verification.rule, "lossless")
        if self.verification.order not in ORDERS:
            refuse("verification.order", self.verification.order, ", ".join(ORDERS))
        if self.verification.order == "deterministic_first" and self.method != "rheo":
            refuse("verification.order", self.verification.order, f"stochastic_first with method={self.method}")
        if self.budget not in BUDGETS:
            refuse("budget", self.budget, ", ".join(BUDGETS))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample of one row: exactly one of `prompt` (raw text), `messages` (put through the chat template) or `token_ids`.

    id: None becomes the request's index. params: None becomes SamplingParams().
    template_kwargs: variables for the chat template (Qwen3's enable_thinking).
    truncate: what becomes of a prompt that does not fit: "error"; "left" and "right" cut text from that end until max_tokens fit too.
    parse_special: special tokens that the text spells (<|im_end|>) become those tokens; otherwise they stay text.
    """

    id: str | None = None
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    token_ids: Sequence[int] | None = None
    params: SamplingParams | None = None
    sample: int = 0
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    truncate: str = "error"
    parse_special: bool = False


class Cycle(NamedTuple):
    """Statistics of one draft-and-verify round of one row (DESIGN.md section 6). All counts.

    accepted: drafted tokens accepted, up to and including an accepted stop or EOS, before a cut at max_tokens.
    emitted: tokens kept, after every cut. depth: levels of the pruned tree. batch_size: rows that shared the round.
    """

    drafted: int
    accepted: int
    emitted: int
    depth: int
    sampled_nodes: int
    sampled_accepted: int
    batch_size: int


@dataclass(kw_only=True)
class Result:
    """What became of one request. With finish_reason "error", `error` says why and the lists are None."""

    id: str
    sample: int
    prompt: str | None
    token_ids: list[int] | None
    text: str | None
    finish_reason: str
    error: RowError | None = None
    num_prompt_tokens: int = 0
    seed: int = 0
    logprobs: list[float] | None = None
    cycles: list[Cycle] | None = None
    latency_s: float = 0.0

    @classmethod
    def failed(cls, id: str, sample: int, error: RowError, *, prompt: str | None, seed: int, **known: Any) -> Result:
        """The result of a row that `error` ended; `known`: other fields that were found before."""
        return cls(id=id, sample=sample, prompt=prompt, token_ids=None, text=None, finish_reason="error", error=error, seed=seed, **known)
