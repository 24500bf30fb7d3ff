"""The configuration of a job: every option, its default and its type. A test freezes the list.

    job = load_config("jobs/quickstart.yaml", ["sampling.n=4", "input.limit=100"])

Relative paths, in the YAML file and in overrides, are relative to the current directory. What is part of the contract and not built
yet is refused by name in `pipeline.checks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from engine.errors import RowError, UserError
from engine.params import Request, SamplingParams, Speculation, Verification
from pipeline.config_file import load_options


@dataclass(kw_only=True)
class JobSection:
    """name: None is the file's name. seed: of every draw, with the row's id and sample."""

    name: str | None = None
    seed: int = 0


@dataclass(kw_only=True)
class InputSection:
    """path: a file, a folder, a glob, or a list of these; a file that several of them name is read once.

    prompt, messages, id, params: columns, or paths into one (`turns.0`); None: not read.
    template: Jinja2 over the columns, which makes the prompt in place of `prompt` and `messages`.
    chat: `auto` makes a prompt one user message when the tokenizer has a chat template, `false` leaves it raw text.
    template_kwargs: variables of the chat template. system: a system message put first.
    truncate, parse_special: as in `engine.Request`. limit: only so many records, the first ones.
    max_errors: stop once more rows than these failed; below 1: more than this share. grow: new files may join the old ones of a job.
    storage_options: where an S3 store is (`endpoint_url`, ...).
    """

    path: Any = MISSING
    format: str = "auto"
    prompt: str | None = "prompt"
    messages: str | None = "messages"
    id: str | None = "id"
    chat: Any = "auto"
    template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    params: str | None = "params"
    truncate: str = Request.truncate
    parse_special: bool = Request.parse_special
    limit: int | None = None
    max_errors: Any = None
    grow: bool = False
    storage_options: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ModelSection:
    """target, draft: a preset, a local folder, a GGUF file or a Hugging Face id."""

    target: str = "smollm2-135m-instruct"
    draft: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    revision: str | None = None
    max_model_len: int | None = None


@dataclass(kw_only=True)
class SamplingSection:
    """The fields of `engine.SamplingParams`, and n: samples per record. Lists and maps: None is empty."""

    temperature: float = SamplingParams.temperature
    top_p: float = SamplingParams.top_p
    top_k: int = SamplingParams.top_k
    min_p: float = SamplingParams.min_p
    eta: float = SamplingParams.eta
    repetition_penalty: float = SamplingParams.repetition_penalty
    logit_bias: Any = None
    max_tokens: int = SamplingParams.max_tokens
    min_tokens: int = SamplingParams.min_tokens
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: bool = SamplingParams.ignore_eos
    n: int = 1
    seed: int | None = None
    logprobs: bool = SamplingParams.logprobs

    def to_params(self) -> SamplingParams:
        """The engine's parameters; raises RowError("bad_params")."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if name != "n" and value is not None}
        return SamplingParams.from_mapping(values)


@dataclass(kw_only=True)
class VerificationSection:
    rule: str = Verification.rule
    order: str = Verification.order


@dataclass(kw_only=True)
class SpeculationSection:
    """The fields of `engine.Speculation`; tree_size and depth None: the preset's."""

    method: str = Speculation.method
    tree_size: int | None = Speculation.tree_size
    depth: int | None = Speculation.depth
    top_k: int = Speculation.top_k
    m: int = Speculation.m
    draft_top: int = Speculation.draft_top
    topology: str = Speculation.topology
    verification: VerificationSection = field(default_factory=VerificationSection)
    budget: str = Speculation.budget

    def to_speculation(self) -> Speculation:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "verification"}
        return Speculation(verification=Verification(**dataclasses.asdict(self.verification)), **values)


@dataclass(kw_only=True)
class EngineSection:
    """max_batch: rows that run at once. kv_cache_gib: memory for keys and values."""

    kind: str = "real"
    max_batch: Any = "auto"
    kv_cache_gib: Any = "auto"
    reproducible: bool = False


@dataclass(kw_only=True)
class RaySection:
    """workers: engines; `auto` is one per GPU, else 1. threads_per_worker: None is all cores shared out."""

    address: str = "local"
    workers: Any = "auto"
    threads_per_worker: int | None = None
    gpus_per_worker: float | None = None


@dataclass(kw_only=True)
class OutputSection:
    """path: the output folder. rows_per_file: None is chosen from the number of rows. overwrite: drop an earlier job's rows.

    retry_errors: generate rows again that failed. storage_options: as for the input.
    """

    path: str = MISSING
    rows_per_file: int | None = None
    storage_options: dict[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    retry_errors: bool = False


@dataclass(kw_only=True)
class JobConfig:
    job: JobSection = field(default_factory=JobSection)
    input: InputSection = field(default_factory=InputSection)
    model: ModelSection = field(default_factory=ModelSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    speculation: SpeculationSection = field(default_factory=SpeculationSection)
    engine: EngineSection = field(default_factory=EngineSection)
    ray: RaySection = field(default_factory=RaySection)
    output: OutputSection = field(default_factory=OutputSection)


def load_config(yaml_path: str, overrides: Sequence[str] = ()) -> JobConfig:
    """The job described by a YAML file with `key=value` overrides over it.

    Raises UserError as `load_options` does. Values are checked by `pipeline.checks.check_config`.
    """
    return load_options(JobConfig, yaml_path, overrides)


def check_sampling(section: SamplingSection) -> SamplingParams:
    """The default parameters of every row; raises UserError with the option, the value and what is allowed."""
    try:
        return section.to_params()
    except RowError as error:
        raise UserError(f"sampling.{error.message}") from None
