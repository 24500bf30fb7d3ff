"""The options of `rheo train-draft`. The sections that `rheo run` has too mean the same: they describe how the target writes its answers.

input: {path: prompts.jsonl}
model: {target: path/to/my-model}
output: {path: out/my-draft}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import UserError
from engine.params import METHODS
from pipeline.config import JobConfig, SpeculationSection
from pipeline.config_file import load_options


@dataclass(kw_only=True)
class AnswersSection:
    """given: the column that holds an answer as text or token ids, or the column of messages whose last one is the answer; None: the
    target writes them.

    max_tokens: of prompt and answer together; what is behind them is not learnt from.
    """

    given: str | None = None
    max_tokens: int = 2048


@dataclass(kw_only=True)
class AnswersSpeculation(SpeculationSection):
    """How the answers are written: without a draft, unless a method is named. Every method writes the same law."""

    method: str = "off"


@dataclass(kw_only=True)
class DraftSection:
    """The head. init: `target`, or an EAGLE-3 head for the same target whose sizes and vocabulary are taken over.

    vocab_size: None is all of the target's, or 32,000 of them. intermediate_size: None is the target's.
    feature_layers: the layers whose inputs are the features; None is EAGLE-3's.
    """

    init: str = "target"
    vocab_size: int | None = None
    intermediate_size: int | None = None
    feature_layers: Any = None


@dataclass(kw_only=True)
class TrainSection:
    """steps: of the optimiser; a run with more goes on where one with fewer ended.

    batch: windows of text in a step, of all workers together. queries: places of a window where drafting begins.
    draft_steps: of the training-time test. step_weight: of each draft step's loss, as a share of the one before.
    columns: tokens of the draft's vocabulary that a step looks at, the likeliest and a sample of the others; None: all.
    acceptance_share: of the loss that is the log of the expected acceptance; the rest is cross-entropy.
    decay: share of the steps, the last ones, over which the learning rate falls to nothing. validation: share of the prompts held out.
    """

    steps: int = 4000
    batch: int = 32
    queries: int = 32
    draft_steps: int = 4
    columns: int | None = None
    step_weight: float = 0.9
    acceptance_share: float = 0.0
    learning_rate: float = 1e-3
    warmup: int = 100
    decay: float = 0.3
    validation: float = 0.03
    validate_every: int = 250
    checkpoint_s: float = 120.0


@dataclass(kw_only=True)
class EvaluationSection:
    """tau of the finished draft on held-out prompts. prompts: how many of them; 0: none. The tree is the method's default."""

    prompts: int = 64
    methods: Any = field(default_factory=lambda: ["rheo"])
    max_tokens: int = 64
    tree_size: int = 60
    depth: int = 8


@dataclass(kw_only=True)
class TrainDraftConfig(JobConfig):
    speculation: AnswersSpeculation = field(default_factory=AnswersSpeculation)
    answers: AnswersSection = field(default_factory=AnswersSection)
    draft: DraftSection = field(default_factory=DraftSection)
    train: TrainSection = field(default_factory=TrainSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)


def load_train_config(yaml_path: str, overrides: Sequence[str] = ()) -> TrainDraftConfig:
    """Raises UserError as `pipeline.config_file.load_options` does, and for a value that is not allowed."""
    config = load_options(TrainDraftConfig, yaml_path, overrides)
    for option, is_valid, allowed in _RULES:
        section, name = option.split(".")
        value = getattr(getattr(config, section), name)
        if not is_valid(value):
            raise UserError(f"{option}={value!r}; allowed: {allowed}")
    return config


def answers_job(config: TrainDraftConfig, path: str) -> JobConfig:
    """The job in which the target writes its answers. path: its output."""
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(JobConfig)}
    output = dataclasses.replace(config.output, path=path, rows_per_file=config.output.rows_per_file or _ROWS_PER_FILE)
    return JobConfig(**{**sections, "output": output})


_ROWS_PER_FILE = 128  # texts whose features are in memory at once while they are captured


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_size(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_layers(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) > 0 and value == sorted(value) and all(type(n) is int and n >= 0 for n in value)
    )


_RULES = (
    ("answers.max_tokens", lambda v: v >= 8, "an integer >= 8"),
    ("draft.vocab_size", _is_size, "an integer >= 1, or null"),
    ("draft.intermediate_size", _is_size, "an integer >= 1, or null"),
    ("draft.feature_layers", _is_layers, "a rising list of layer numbers, or null"),
    *((f"train.{name}", _is_count, "an integer >= 1") for name in ("steps", "batch", "queries", "draft_steps", "validate_every")),
    ("train.columns", lambda v: v is None or v >= 8, "an integer >= 8, or null"),
    ("train.warmup", lambda v: v >= 0, "an integer >= 0"),
    ("train.step_weight", lambda v: 0 < v <= 1, "a number above 0, at most 1"),
    ("train.acceptance_share", lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    ("train.learning_rate", lambda v: 0 < v < 1, "a number above 0, below 1"),
    ("train.decay", lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    ("train.validation", lambda v: 0 < v < 1, "a number above 0, below 1"),
    ("train.checkpoint_s", lambda v: v > 0, "a number of seconds above 0"),
    ("evaluation.prompts", lambda v: v >= 0, "an integer >= 0"),
    ("evaluation.methods", lambda v: isinstance(v, list) and set(v) <= set(METHODS), f"a list of {', '.join(METHODS)}"),
)
