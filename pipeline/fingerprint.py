"""The fingerprint: everything that can change a job's rows, so that rows of two different jobs never meet in one output.

It is a flat map from names to JSON values, kept in run.json. `input.files` is a list of [name, hash], in the order of the rows.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.errors import UserError
from engine.models.presets import PRESETS
from pipeline.config import JobConfig, SamplingSection, SpeculationSection
from pipeline.config_file import option_names
from pipeline.formats import format_of
from pipeline.input_file import InputFile
from pipeline.models import Models
from pipeline.wording import clip, count

#: Raise it when the same job, by its fingerprint, would give other rows than before: in the reading of files, ids and the order of rows,
#: templating, tokenising, parameters, the law that is sampled, random keys, stopping, or the columns of the output. Not for what is
#: faster, for messages, or for columns that differ between two runs anyhow (latency_s, worker, batch sizes).
ROWS_VERSION = 1

#: options that change neither which rows there are nor what they hold (with `rheo` and `budget=auto`, the law, but not the text)
FREE_OPTIONS = {
    "job.name", "input.path", "input.max_errors", "input.grow", "input.storage_options",
    "model.device", "model.attention", "speculation.budget", "engine.max_batch", "engine.kv_cache_gib",
    "ray.address", "ray.workers", "ray.threads_per_worker", "ray.gpus_per_worker",
    "output.path", "output.rows_per_file", "output.storage_options", "output.overwrite", "output.retry_errors",
}  # fmt: skip

#: options that are in the fingerprint by what they come to: models by their content, the format with each file
_RESOLVED_OPTIONS = {"model.target", "model.draft", "model.revision", "input.format"}

_FILES, _MODELS, _VERSION = "input.files", ("model.target", "model.draft"), "rows_version"

#: where they are null they are the preset's, so they belong to the target
_TREE = ("speculation.tree_size", "speculation.depth")

#: which of several differences is told: what users change most comes first
_ORDER = ("sampling.", "input.", "job.", "engine.", "speculation.", "model.")
_LAST = (_FILES, *_MODELS, *_TREE, _VERSION)

_HASHED = (*_MODELS, "speculation.topology")

_SHOW_CHARACTERS = 48
_SHOW_BEFORE = 16
_SHOW_FIELDS = 4


def describe_job(config: JobConfig, files: list[InputFile]) -> dict[str, Any]:
    """All that needs no model, of a config that passed `check_config`. Hashes the files.

    Every option is in it that is not in FREE_OPTIONS, so that a new one cannot be forgotten; two ways to say one thing give one value. But
    `model.dtype` is as asked: who goes on with rows of `auto` must take the dtype that it came to then (run.json, `engine.dtype`), because
    it may come to another one on another machine.

    Raises UserError for a topology that cannot be found or read, a value that JSON cannot hold, and files that cannot be read.
    """
    config = dataclasses.replace(config, sampling=_resolve_sampling(config.sampling), speculation=_resolve_topology(config))
    names = [name for name in option_names(JobConfig) if name not in FREE_OPTIONS | _RESOLVED_OPTIONS]
    values = {name: functools.reduce(getattr, name.split("."), config) for name in names}
    fingerprint = {name: _to_json(name, value) for name, value in values.items() if name not in _TREE or value is not None}
    with ThreadPoolExecutor() as pool:  # reading and hashing let other threads run
        fingerprint[_FILES] = list(pool.map(_describe_file, files))
    return {**fingerprint, _VERSION: ROWS_VERSION}


def describe_models(config: JobConfig, models: Models) -> dict[str, Any]:
    """The rest: the content of target and draft (see `engine.models.content`), and the tree that the target brings where none is asked for.

    All bytes of local models are read. The draft of the method `off` is null. Raises UserError for files that cannot be read.
    """
    target, draft = models.target, models.draft
    if config.engine.kind == "real":
        from engine.models.content import describe_draft, describe_target

        target = describe_target(models.target, models.revision)
        draft = None if config.speculation.method == "off" else describe_draft(models.draft, models.target)
    return {**dict(zip(_MODELS, (target, draft), strict=True)), **_find_tree(config)}


def find_difference(before: Mapping[str, Any], now: Mapping[str, Any], *, grow: bool) -> str | None:
    """What differs between the fingerprints of an earlier run and of this job, as the end of a sentence; None when nothing does.

    It names the first field with both values, and how many more there are: "sampling.temperature (0.7 -> 1.0) and 1 more field (job.seed)".
    grow: files that come after all the earlier ones, which are as they were, are no difference.
    """
    names = [name for name in {**now, **before} if not _is_same(name, before, now, grow)]
    if not names:
        return None
    names.sort(key=lambda name: (name not in before or name not in now, _rank(name)))  # options of another rheo say the least
    first, *others = names
    told = f"{first} ({_tell(first, before, now)})"
    if not others:
        return told
    shown = ", ".join(others[:_SHOW_FIELDS]) + (", ..." if len(others) > _SHOW_FIELDS else "")
    return f"{told} and {count(len(others), 'more field')} ({shown})"


def _resolve_sampling(section: SamplingSection) -> SamplingSection:
    """With lists and maps as the engine reads them: one stop string is a list, each bias a float."""
    params = section.to_params()
    bias = {token: float(value) for token, value in params.logit_bias.items()}
    return dataclasses.replace(section, **{**dataclasses.asdict(params), "logit_bias": bias})


def _resolve_topology(config: JobConfig) -> SpeculationSection:
    """With the topology by its content, where it is used."""
    section = config.speculation
    if section.method != "static" or config.engine.kind == "fake":
        return section
    from engine.models.content import hash_file
    from engine.models.source import resolve_topology

    return dataclasses.replace(section, topology=hash_file(resolve_topology(section.topology, PRESETS.get(config.model.target))))


def _find_tree(config: JobConfig) -> dict[str, int]:
    """What the engine takes for a tree_size and a depth that are null."""
    preset = PRESETS.get(config.model.target) if config.engine.kind == "real" else None
    tree = config.speculation.to_speculation()
    tree = tree.with_tree() if preset is None else tree.with_tree(preset.tree_size, preset.depth)
    return {f"speculation.{name}": getattr(tree, name) for name in ("tree_size", "depth") if getattr(config.speculation, name) is None}


def _describe_file(file: InputFile) -> list[str]:
    """[name, hash]; before the hash the format, where it is not what the name says."""
    content = file.content_hash()
    return [file.name, content if file.format == format_of(file.name, "auto") else f"{file.format}, {content}"]


def _to_json(name: str, value: Any) -> Any:
    """The value as it comes back from run.json; the order of an option's own keys says nothing."""
    try:
        plain = json.loads(json.dumps(value, allow_nan=False))
        return dict(sorted(plain.items())) if isinstance(plain, dict) else plain
    except (TypeError, ValueError, RecursionError) as error:
        allowed = "text, finite numbers, true, false, null, lists and maps"
        raise UserError(f"{name}={clip(repr(value))} has what JSON cannot hold ({error}); allowed: {allowed}") from None


def _is_same(name: str, before: Mapping[str, Any], now: Mapping[str, Any], grow: bool) -> bool:
    if name not in before or name not in now:
        return False
    if name == _FILES and grow:
        return now[name][: len(before[name])] == before[name]
    return json.dumps(before[name]) == json.dumps(now[name])  # text: to a template 1 is not true, and maps have an order


def _rank(name: str) -> int:
    if name in _LAST:
        return len(_ORDER) + _LAST.index(name)
    return next((rank for rank, start in enumerate(_ORDER) if name.startswith(start)), len(_ORDER))


def _tell(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How a field differs."""
    if name not in now:
        return f"{_clip(_show(before[name]))} -> not known to this version of rheo"
    if name not in before:
        return f"not known to the version of rheo that wrote the rows -> {_clip(_show(now[name]))}"
    if name == _FILES:
        return _tell_files(before[name], now[name])
    change = (_tell_hashes if name in _HASHED else _tell_values)(before[name], now[name])
    return f"{change}: another version of rheo wrote the rows" if name == _VERSION else change


def _tell_values(before: Any, now: Any) -> str:
    """Both values; of long ones the part around the first place where they differ."""
    texts = [_show(before), _show(now)]
    if max(map(len, texts)) <= _SHOW_CHARACTERS:
        return " -> ".join(texts)
    num_same = next((place for place, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = max(0, num_same - _SHOW_BEFORE)
    return " -> ".join(_clip(text, start) for text in texts)


def _tell_hashes(before: str | None, now: str | None) -> str:
    """Both texts, with the first digits of the hashes in them."""
    return " -> ".join(re.sub("[0-9a-f]{32,}", lambda digits: f"{digits[0][:8]}..", _show(text).strip('"')) for text in (before, now))


def _show(value: Any) -> str:
    """As JSON, in characters that do nothing to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in json.dumps(value, ensure_ascii=False))


def _clip(text: str, start: int = 0) -> str:
    end = start + _SHOW_CHARACTERS
    return ("..." if start else "") + text[start:end] + ("..." if text[end:] else "")


def _tell_files(before: list[list[str]], now: list[list[str]]) -> str:
    """The first file that is changed or missing, else in another place, else new."""
    hashes, names = dict(now), {content: name for name, content in now}
    there = {(name, content) for name, content in now}
    gone = [(name, content) for name, content in before if (name, content) not in there]
    new = [name for name, _ in now[len(before) :]]
    more = f", and {count(len(gone or new) - 1, 'more file')}" if len(gone or new) > 1 else ""
    if gone:
        name, content = gone[0]
        if name in hashes and _is_of_store(content) != _is_of_store(hashes[name]):
            change = _tell_hashes(content, hashes[name])
            return f"'{name}' is on another kind of store, and contents cannot be compared between a disk and S3: {change}{more}"
        if name in hashes:
            return f"'{name}' is changed: {_tell_hashes(content, hashes[name])}{more}"
        return f"'{name}' is missing" + (f": '{names[content]}' has its content" if content in names else "") + more
    if now[: len(before)] != before:
        (name, _), (place, _) = next(pair for pair in zip(now, before, strict=False) if pair[0] != pair[1])
        return f"'{name}' is in the place of '{place}'"
    return f"'{new[0]}' is new{more}; allowed: input.grow=true"


def _is_of_store(content: str) -> bool:
    """Whether what `_describe_file` says is of an object: `text, etag:...`."""
    return content.rpartition(", ")[2].startswith("etag:")
