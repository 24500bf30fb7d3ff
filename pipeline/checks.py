"""Everything that can be checked before a model is loaded: option values, what is not built yet, input, output, model names."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UserError, unknown_name
from engine.params import SamplingParams
from pipeline.config import InputSection, JobConfig, check_sampling
from pipeline.files import InputFile, find_files, glob_matches, list_paths
from pipeline.formats import READERS
from pipeline.records import MAX_SAMPLES
from pipeline.s3 import SCHEME, check_options, hide_login, is_s3
from pipeline.sources import order_files
from pipeline.template import compile_template

_CHOICES = {
    "input.format": ("auto", *READERS),
    "input.truncate": ("error", "left", "right"),
    "model.dtype": ("auto", "float32", "bfloat16", "float16"),
    "model.attention": ("auto", "sdpa", "native"),
    "engine.kind": ("real", "fake"),
    "ray.address": ("local",),
}

#: values of the contract that have no code behind them yet
_UNBUILT = {
    "model.attention": ("flash", "flex"),
}

#: options of the contract that must keep their default for now
_UNBUILT_OPTIONS = ("ray.gpus_per_worker",)

#: names that a job writes into its output, of each kind one
_WRITTEN = ("rows/part-00000000.parquet", "run.json", "ray.log")


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
    Rule(
        "input.max_errors",
        lambda v: v is None or (isinstance(v, int | float) and not isinstance(v, bool) and (0 < v < 1 or (v >= 0 and v % 1 == 0))),
        "a number of rows, a share of them below 1, or null",
    ),
    Rule("input.limit", lambda v: v is None or _is_count(v), "an integer >= 1, or null"),
    Rule("model.device", lambda v: v in ("auto", "cpu", "cuda"), "auto, cpu, cuda"),
    Rule("model.max_model_len", lambda v: v is None or v >= 2, "an integer >= 2, or null"),
    Rule("sampling.n", lambda v: _is_count(v) and v <= MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}"),
    Rule("engine.max_batch", lambda v: v == "auto" or _is_count(v), "auto, or an integer >= 1"),
    Rule(
        "engine.kv_cache_gib",
        lambda v: v == "auto" or (isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf),
        "auto, or a finite number > 0",
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
    if not (isinstance(config.input.path, str) or _is_list_of_paths(config.input.path)):
        raise UserError(f"input.path={_show(config.input.path)}; allowed: a path, or a list of paths")
    for option, paths in (("input.path", list_paths(config.input.path)), ("output.path", [config.output.path])):
        for path in paths:
            _check_path(option, path)
    for section in ("input", "output"):
        check_options(f"{section}.storage_options", getattr(config, section).storage_options)
    if config.output.overwrite and config.output.retry_errors:
        raise UserError("output.overwrite=true with output.retry_errors=true, which needs the rows it drops; allowed: one of them")
    _check_prompt_options(config.input)
    if config.engine.reproducible and config.model.dtype not in ("auto", "float32"):
        raise UserError(f"model.dtype='{config.model.dtype}' with engine.reproducible=true; allowed: auto, float32")
    config.speculation.to_speculation().check()
    if config.speculation.method == "off" and config.model.draft != "auto":
        raise UserError(f"model.draft='{config.model.draft}' with speculation.method=off, which drafts nothing; allowed: auto")
    return check_sampling(config.sampling)


def _is_list_of_paths(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(path, str) for path in value)


def _check_path(option: str, path: str) -> None:
    if not path:
        raise UserError(f"{option} is empty; allowed: a path")
    if "://" in path and not is_s3(path):
        raise UserError(f"{option}={_show(path)} is on a store that is not built yet; allowed: a local path, {SCHEME}bucket/name")
    if is_s3(path) and ("@" in path or not path.removeprefix(SCHEME).strip("/")):
        raise UserError(f"{option}: no bucket, or credentials, in an {SCHEME} path; allowed: {SCHEME}bucket/name")


def _check_prompt_options(section: InputSection) -> None:
    """Raises UserError for options that make a prompt in two ways, or in none, or have no effect."""
    if section.prompt is None and section.messages is None and section.template is None:
        raise UserError("input.prompt and input.messages are both null; allowed: at least one column, or input.template")
    if section.template is not None:
        compile_template(section.template)
        for name in ("prompt", "messages"):
            column = getattr(section, name)
            if column not in (None, getattr(InputSection, name)):
                raise UserError(f"input.{name}='{column}' beside input.template, which makes the prompt; allowed: one of them")
    name = _needing_chat(section)
    if name is not None and section.chat is False:
        raise UserError(f"input.{name} needs the chat template, and input.chat=false; allowed: input.chat=auto or true")


def _needing_chat(section: InputSection) -> str | None:
    """The option, if any, that no row can follow without a chat template."""
    is_set = {"system": section.system is not None, "template_kwargs": bool(section.template_kwargs), "chat": section.chat is True}
    return next((name for name in is_set if is_set[name]), None)


def check_model(config: JobConfig) -> None:
    """Raises UserError for a target, draft or topology that cannot be found or is of no supported kind. Loads nothing."""
    if config.engine.kind == "fake":
        return
    from engine.models.source import check_draft, check_target, locate_target, resolve_topology
    from engine.topology import read_topology

    preset = check_target(config.model.target, config.model.revision, config.model.max_model_len)
    place = locate_target(config.model.target, config.model.revision)[1]
    if isinstance(place, Path) and place.is_dir():
        check_chat_template(config.input, place)
    check_draft(config.model.draft, preset, config.speculation.method, config.model.target)
    if config.speculation.method == "static":
        speculation = config.speculation.to_speculation()
        speculation = speculation.with_tree() if preset is None else speculation.with_tree(preset.tree_size, preset.depth)
        read_topology(resolve_topology(speculation.topology, preset)).first(speculation.tree_size - 1, speculation.depth)


def check_chat_template(section: InputSection, target: Path) -> None:
    """Raises UserError for options that need a chat template which the tokenizer in the target's folder has not."""
    from engine.models.folder import read_config

    name = _needing_chat(section)
    files = [target / "chat_template.jinja", *target.glob("additional_chat_templates/*.jinja")]
    config = target / "tokenizer_config.json"
    if name is None or any(map(Path.is_file, files)) or (config.is_file() and read_config(target, config.name).get("chat_template")):
        return
    raise UserError(f"input.{name} needs a chat template, and the tokenizer in '{target}' has none; allowed: a target with one")


def check_places(config: JobConfig) -> None:
    """Raises UserError when the output lies inside a folder of the input, or a glob matches what it will hold."""
    output = config.output.path
    for path in list_paths(config.input.path):
        is_folder = is_s3(path) or os.path.isdir(path)  # in a bucket, what is no folder yet would be one afterwards
        if is_folder and _is_inside(output, path):
            raise UserError(f"output.path '{output}' is inside input.path '{path}'; allowed: a folder outside it")
        if any(glob_matches(path, os.path.join(output, name)) for name in _WRITTEN):
            raise UserError(
                f"output.path '{output}' will hold files that input.path '{path}' matches; allowed: a folder where it matches nothing"
            )


def find_input(config: JobConfig, earlier_names: list[str]) -> tuple[list[InputFile], list[str]]:
    """The files of the input in the order in which their rows are numbered, and the names in its folders that are no input.

    earlier_names: of the files of an earlier run, which come first.

    Raises UserError as `find_files` does, and for a file inside the output.
    """
    section = config.input
    files, ignored = find_files(section.path, section.format, section.storage_options)
    for file in files:
        if _is_inside(file.path, config.output.path):
            raise UserError(
                f"input file '{file.path}' is inside output.path '{config.output.path}'; allowed: an output folder without input"
            )
    return order_files(files, earlier_names), ignored


def describe_ignored(names: list[str]) -> str:
    """What the folders of the input hold besides."""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)}, as no input (another suffix, hidden, or a link to a folder): {shown}"


def _is_inside(path: str, folder: str) -> bool:
    if is_s3(path) or is_s3(folder):
        return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")
    path, folder = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([path, folder]) == folder


def _required(section: str) -> dict[str, str]:
    return {"path": ""} if section in ("input", "output") else {}


def _get(config: JobConfig, option: str) -> Any:
    section, name = option.split(".")
    return getattr(getattr(config, section), name)


def _show(value: Any) -> str:
    """As in YAML, without what a URL may hold of a login."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else hide_login(repr(value))
