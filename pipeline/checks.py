"""Everything that can be checked before a model is loaded: option values, what is not built yet, input, output, model names."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.errors import UserError, unknown_name
from engine.params import SamplingParams
from pipeline.config import JobConfig, check_sampling
from pipeline.records import MAX_SAMPLES, Columns
from pipeline.sources import Plan, scan_input

_CHOICES = {
    "input.format": ("auto", "jsonl", "parquet"),
    "input.truncate": ("error",),
    "model.dtype": ("auto", "float32", "bfloat16", "float16"),
    "model.attention": ("auto", "sdpa"),
    "engine.kind": ("real", "fake"),
    "ray.address": ("local",),
}

#: values of the contract that have no code behind them yet
_UNBUILT = {
    "input.format": ("csv", "text"),
    "input.truncate": ("left", "right"),
    "model.attention": ("flash", "flex"),
}

#: options of the contract that must keep their default for now
_UNBUILT_OPTIONS = (
    "input.template",
    "input.template_kwargs",
    "input.max_errors",
    "input.grow",
    "input.storage_options",
    "output.storage_options",
    "output.retry_errors",
    "ray.gpus_per_worker",
)


@dataclass(frozen=True)
class Rule:
    option: str
    is_valid: Callable[[Any], bool]
    allowed: str


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_RULES = (
    Rule("job.seed", lambda v: abs(v) < 2**63, "a 64-bit integer"),
    Rule("input.chat", lambda v: v == "auto" or isinstance(v, bool), "auto, true, false"),
    Rule("input.limit", lambda v: v is None or _is_count(v), "an integer >= 1, or null"),
    Rule("model.device", lambda v: v in ("auto", "cpu", "cuda"), "auto, cpu, cuda"),
    Rule("model.max_model_len", lambda v: v is None or v >= 2, "an integer >= 2, or null"),
    Rule("sampling.n", lambda v: _is_count(v) and v <= MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}"),
    Rule("engine.max_batch", lambda v: v == "auto" or _is_count(v), "auto, or an integer >= 1"),
    Rule(
        "engine.kv_cache_gib",
        lambda v: v == "auto" or (isinstance(v, int | float) and not isinstance(v, bool) and v > 0),
        "auto, or a number > 0",
    ),
    Rule("ray.workers", lambda v: v == "auto" or _is_count(v), "auto, or an integer >= 1"),
    Rule("ray.threads_per_worker", lambda v: v is None or _is_count(v), "an integer >= 1, or null"),
    Rule("output.rows_per_file", lambda v: v is None or _is_count(v), "an integer >= 1, or null"),
)


def check_config(config: JobConfig) -> SamplingParams:
    """The default sampling parameters; raises UserError for a value that is not allowed or not built yet."""
    for option in _UNBUILT_OPTIONS:
        section, name = option.split(".")
        default = getattr(type(getattr(config, section))(**_required(section)), name)
        if _get(config, option) != default:
            raise UserError(f"{option}={_show(_get(config, option))} is not built yet; allowed: {_show(default)}")
    for option, choices in _CHOICES.items():
        value = _get(config, option)
        if value in _UNBUILT.get(option, ()):
            raise UserError(f"{option}='{value}' is not built yet; allowed: {', '.join(choices)}")
        if value not in choices:
            raise UserError(unknown_name(option, value, choices))
    for rule in _RULES:
        value = _get(config, rule.option)
        if not rule.is_valid(value):
            raise UserError(f"{rule.option}={_show(value)}; allowed: {rule.allowed}")
    for option in ("input.path", "output.path"):
        value = _get(config, option)
        if "://" in value:
            raise UserError(f"{option}='{value}': object stores are not built yet; allowed: a local path")
        if not value:
            raise UserError(f"{option} is empty; allowed: a path")
    if config.input.prompt is None and config.input.messages is None:
        raise UserError("input.prompt and input.messages are both null; allowed: at least one column")
    if config.input.system is not None and config.input.chat is False:
        raise UserError("input.system needs the chat template, and input.chat=false; allowed: input.chat=auto or true")
    if config.engine.reproducible and config.model.dtype not in ("auto", "float32"):
        raise UserError(f"model.dtype='{config.model.dtype}' with engine.reproducible=true; allowed: auto, float32")
    config.speculation.to_speculation().check()
    if config.speculation.method == "off" and config.model.draft != "auto":
        raise UserError(f"model.draft='{config.model.draft}' with speculation.method=off, which drafts nothing; allowed: auto")
    return check_sampling(config.sampling)


def check_model(config: JobConfig) -> None:
    """Raises UserError for a target or draft that cannot be found or is of no supported kind. Loads nothing."""
    if config.engine.kind == "fake":
        return
    from engine.models.source import check_draft, check_target

    preset = check_target(config.model.target, config.model.revision)
    check_draft(config.model.draft, preset, config.speculation.method, config.model.target)


def check_output(path: str) -> None:
    """Writes and deletes a probe in the output folder. Raises UserError when that fails; leaves nothing behind."""
    made = _make_folders(path)
    probe = os.path.join(path, f".probe-{uuid.uuid4().hex[:8]}")
    try:
        with open(probe, "wb") as file:
            file.write(b"rheo")
        os.unlink(probe)
    except OSError as error:
        raise UserError(f"output.path '{path}' cannot be written: {error.strerror}") from None
    finally:
        for folder in made:
            os.rmdir(folder)


def check_input(config: JobConfig, defaults: SamplingParams) -> tuple[Plan, Columns]:
    """Goes through the input once. Raises UserError as `scan_input` does, and when output or input lies inside the other."""
    output = config.output.path
    if os.path.isdir(config.input.path) and _is_inside(output, config.input.path):
        raise UserError(f"output.path '{output}' is inside input.path '{config.input.path}'; allowed: a folder outside it")
    columns = Columns(config.input, defaults, config.sampling.n)
    plan = scan_input(config.input.path, config.input.format, columns)
    for file in plan.files:
        if _is_inside(file.path, output):
            raise UserError(f"input file '{file.path}' is inside output.path '{output}'; allowed: an output folder without input")
    return plan, columns


def _is_inside(path: str, folder: str) -> bool:
    path, folder = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([path, folder]) == folder


def _make_folders(path: str) -> list[str]:
    """Makes a folder with its parents; returns those that were not there, innermost first."""
    missing = []
    folder = os.path.abspath(path)
    while not os.path.exists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UserError(f"output.path '{path}' cannot be made: {error.strerror}") from None
    return missing


def _required(section: str) -> dict[str, str]:
    return {"path": ""} if section in ("input", "output") else {}


def _get(config: JobConfig, option: str) -> Any:
    section, name = option.split(".")
    return getattr(getattr(config, section), name)


def _show(value: Any) -> str:
    """As in YAML."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
