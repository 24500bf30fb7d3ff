"""The configuration of a job: every option, its default and its type. A test freezes the list.

    job = load_config("jobs/quickstart.yaml", ["sampling.n=4", "input.limit=100"])

Relative paths, in the YAML file and in overrides, are relative to the current directory. What is part of the contract and not built
yet is refused by name in `pipeline.checks`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from engine.errors import RowError, UserError, unknown_name
from engine.params import Request, SamplingParams, Speculation, Verification


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

    Raises UserError for a file that cannot be read, an unknown option, a wrong type or a missing required option. Values are checked
    by `pipeline.checks.check_config`.
    """
    layers = [_read_yaml(yaml_path), *map(_read_override, overrides)]
    for layer in layers:
        _refuse_unknown(layer, JobConfig, prefix="")
        speculation = layer.get("speculation")
        if speculation and speculation.get("method") is False:  # a bare `off` in YAML
            speculation["method"] = "off"
    try:
        merged = OmegaConf.merge(OmegaConf.structured(JobConfig), *layers)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(_describe(error, layers)) from None
    if config.job.name is None:
        config.job.name = os.path.splitext(os.path.basename(yaml_path))[0]
    return config


def _read_override(override: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"override '{override}'; allowed: key=value, for instance sampling.temperature=0.7")
    is_text = _annotation(key) in ("str", "str | None")
    try:
        layer = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except YAMLError:
        if not is_text:
            raise UserError(f"override '{override}' is not valid YAML; allowed: quotes around text, as {key}='\"a: b\"'") from None
        layer = {}
    except OmegaConfBaseException as error:
        raise UserError(f"override '{override}' cannot be read: {_first_line(error)}") from None
    if is_text and not isinstance(_lookup(layer, key), str) and value != "null":  # `{{ a }}` is a map in YAML, and `a: b: c` is nothing
        for part in reversed(key.split(".")):
            value = {part: value}
        return value
    return layer


def _annotation(key: str) -> str | None:
    """The type of an option, as it is written; None for what is no option."""
    section: Any = JobConfig
    found = None
    for part in key.split("."):
        found = next((f for f in dataclasses.fields(section) if f.name == part), None) if section else None
        section = found.default_factory if found and dataclasses.is_dataclass(found.default_factory) else None
    return str(found.type) if found else None


def option_names(section: type = JobConfig, prefix: str = "") -> list[str]:
    """Every option as a dotted name, in the order of the classes."""
    names = []
    for name, nested in _fields(section).items():
        names += option_names(nested, f"{prefix}{name}.") if nested else [prefix + name]
    return names


def _read_yaml(path: str) -> dict:
    try:
        container = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        folder = os.path.dirname(path) or "."
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        near = difflib.get_close_matches(os.path.basename(path), names, n=1)
        hint = f"; did you mean '{os.path.join(os.path.dirname(path), near[0])}'?" if near else ""
        raise UserError(f"job file '{path}' does not exist{hint}") from None
    except OSError as error:
        raise UserError(f"job file '{path}' cannot be read: {error.strerror or 'it is no YAML map'}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"job file '{path}' is not UTF-8: {error.reason} at byte {error.start}") from None
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"job file '{path}' is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(container, dict):
        raise UserError(f"job file '{path}' holds a {type(container).__name__}; allowed: a map of sections ({_sections()})")
    return {name: value for name, value in container.items() if value is not None}  # `sampling:` alone is an empty section


def _sections() -> str:
    return ", ".join(_fields(JobConfig))


def _fields(section: type) -> dict[str, type | None]:
    """Field names, each with the section class it holds, if any."""
    found = {}
    for f in dataclasses.fields(section):
        nested = f.default_factory if dataclasses.is_dataclass(f.default_factory) else None
        found[f.name] = nested
    return found


def _refuse_unknown(values: Mapping[str, Any], section: type, prefix: str) -> None:
    fields = _fields(section)
    for name, value in values.items():
        if name not in fields:
            allowed = list(fields)
            elsewhere = [option for option in option_names() if option.rsplit(".", 1)[-1] == name]
            hint = f"; '{elsewhere[0]}' is an option" if elsewhere else ""
            what = f"option in '{prefix[:-1]}'" if prefix else "section"
            raise UserError(unknown_name(what, name, allowed) + hint)
        nested = fields[name]
        if nested is None or value is None:
            continue
        if not isinstance(value, Mapping):
            raise UserError(f"{prefix}{name}={value!r}; allowed: a map with {', '.join(_fields(nested))}")
        _refuse_unknown(value, nested, f"{prefix}{name}.")


def _describe(error: OmegaConfBaseException, layers: list[dict]) -> str:
    """An omegaconf error as: the option, its value, what is allowed."""
    name = error.full_key or ""
    section: Any = JobConfig
    value: Any = None
    for part in name.split("."):
        section = next((f for f in dataclasses.fields(section) if f.name == part), None) if section else None
        if section is None:
            break
        annotation = section.type
        section = section.default_factory if dataclasses.is_dataclass(section.default_factory) else None
    else:
        for layer in layers:
            found = _lookup(layer, name)
            value = found if found is not None else value
        if type(error).__name__ == "MissingMandatoryValue":
            return f"{name} is required; set it in the job file or with {name}=..."
        if type(error).__name__ == "ValidationError":
            return f"{name}={value!r}; allowed: {_ALLOWED.get(str(annotation), str(annotation))}"
    return f"{name}: {_first_line(error)}" if name else _first_line(error)


_ALLOWED = {
    "int": "an integer",
    "int | None": "an integer or null",
    "float": "a number",
    "float | None": "a number or null",
    "bool": "true or false",
    "str": "text",
    "str | None": "text or null",
    "dict[str, Any]": "a map",
}


def _lookup(layer: Any, name: str) -> Any:
    for part in name.split("."):
        layer = layer.get(part) if isinstance(layer, Mapping) else None
    return layer


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def check_sampling(section: SamplingSection) -> SamplingParams:
    """The default parameters of every row; raises UserError with the option, the value and what is allowed."""
    try:
        return section.to_params()
    except RowError as error:
        raise UserError(f"sampling.{error.message}") from None
