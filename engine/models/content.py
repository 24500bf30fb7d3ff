"""What a model is by its content: the same text for the same model wherever it lies, and another one as soon as a byte differs that the
engine reads. Imports no torch.

    sha256 5f2c...                                    a folder
    sha256 9ab1..., conversion 1                      a GGUF file, and the version of the code that converts it
    commit 7e27...                                    a repository on Hugging Face
    smollm2-135m-instruct, sha256 9ab1..., conversion 1   a preset: its name, what it stands for here, and its chat template, if it has one
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.errors import UserError
from engine.models.folder import find_weights, read_weight_map
from engine.models.gguf import CONVERTER_VERSION
from engine.models.hub import HubModel, fetch_config
from engine.models.presets import PRESETS
from engine.models.source import Place, locate_draft, locate_target

#: what the engine reads in a model folder beside the weights; a test watches it reading
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.*.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


def describe_target(target: str, revision: str | None = None) -> str:
    """The content of `target`, named as in `source.check_target`.

    Of a folder or a GGUF file every byte is read. Raises UserError for what cannot be found or read.
    """
    preset, place = locate_target(target, revision)
    if preset is None:
        return _describe(place)
    template = "" if preset.chat_template is None else f", chat template {hash_file(preset.chat_template)}"
    return f"{preset.name}, {_describe(place)}{template}"


def describe_draft(draft: str, target: str) -> str:
    """The content of `draft`, named as in `source.resolve_draft`; "ngram" is its name. Raises as `describe_target`."""
    if draft == "ngram":
        return draft
    content = _describe(locate_draft(draft, PRESETS.get(target)))
    return f"{draft}, {content}" if draft in PRESETS else content


def hash_file(path: Path) -> str:
    """`sha256` and the hexadecimal digits. Raises UserError for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from None


def _describe(place: Place) -> str:
    if isinstance(place, HubModel):
        return f"commit {fetch_config(place).name}"
    return _hash_folder(place) if place.is_dir() else f"{hash_file(place)}, conversion {CONVERTER_VERSION}"


def _hash_folder(folder: Path) -> str:
    names = sorted(_find_files(folder))
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        hashes = pool.map(hash_file, [folder / name for name in names])
        listing = "".join(f"{name}\0{file_hash}\n" for name, file_hash in zip(names, hashes, strict=True))
    return f"sha256 {hashlib.sha256(os.fsencode(listing)).hexdigest()}"


def _find_files(folder: Path) -> set[str]:
    """Names relative to the folder. Raises UserError when the weights are not whole."""
    weights = find_weights(folder)
    names = {weights.name, *(read_weight_map(weights).values() if weights.suffix == ".json" else ())}
    return names | {path.relative_to(folder).as_posix() for pattern in _FILES for path in folder.glob(pattern) if path.is_file()}
