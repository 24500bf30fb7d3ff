"""Turns a GGUF file into an ordinary model folder, once per machine. Imports torch only to convert.

The folder lives in the cache under the content's hash, so another file, or another version of this converter, never meets an old result.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from engine.cache_folder import cache_folder
from engine.errors import UserError
from engine.models.folder import read_config

logger = logging.getLogger(__name__)

CONVERTER_VERSION = 1  # raise it when a change here or in gguf_*.py changes what is written
GGUF_MAGIC = b"GGUF"


def converted_folder(gguf_file: Path) -> Path:
    """Where the conversion of `gguf_file` is or will be; its content is hashed (0.1 s per 100 MB)."""
    with gguf_file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return cache_folder() / "models" / f"{gguf_file.stem}-{digest[:16]}-v{CONVERTER_VERSION}"


def check_gguf(gguf_file: Path) -> dict[str, Any]:
    """What config.json says, or would say, of the model in `gguf_file`; nothing is converted.

    Raises UserError when it is no GGUF file; or, not yet converted, holds what the engine cannot run exactly.
    """
    _check_readable(gguf_file)
    folder = converted_folder(gguf_file)
    if folder.is_dir():
        return read_config(folder)
    from engine.models.gguf_content import GGUFModel

    return GGUFModel(gguf_file).config


def convert_gguf(gguf_file: Path) -> Path:
    """The model folder (safetensors, configuration, tokenizer) made from `gguf_file`, converted now if it is not in the cache.

    Processes that start at once convert once: one holds the lock, the others wait for its result. The folder appears by a rename, so a
    conversion that was cut short is never used. Raises UserError as `check_gguf`, and when the cache cannot be written.
    """
    folder = converted_folder(gguf_file)
    if folder.is_dir():  # without the lock, so a cache can be read-only
        return folder
    _check_readable(gguf_file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):  # of a run that died; nobody else writes under this lock
                    shutil.rmtree(leftover)
                logger.warning("converting %s once into %s (about a minute per GB)", gguf_file.name, folder)
                unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
                _write_model(gguf_file, unfinished)
                _make_durable(unfinished)
                unfinished.rename(folder)
    except OSError as error:
        raise UserError(f"the model cache '{folder.parent}' cannot be written ({error}); set RHEO_CACHE to a folder that can") from None
    return folder


def _check_readable(gguf_file: Path) -> None:
    try:
        with gguf_file.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise UserError(f"'{gguf_file}' cannot be read: {error.strerror}") from None
    if magic != GGUF_MAGIC:
        raise UserError(f"'{gguf_file}' is no GGUF file: it begins with {magic!r}, not {GGUF_MAGIC!r}")
    if importlib.util.find_spec("gguf") is None and not converted_folder(gguf_file).is_dir():
        raise UserError(f"reading '{gguf_file}' needs the package gguf: pip install 'rheo[gguf]'")


def _write_model(gguf_file: Path, folder: Path) -> None:
    """Every number as it is in the file; those of quantised matrices in fp32.

    Dequantised values (say fp16 scale * 4-bit integer + fp16 minimum) do not fit in 16 bits. Measured on the Q4_1 file of SmolLM2-135M:
    bf16 would change 82% of the values, by up to 0.014 (fp16: up to 0.002).
    """
    from safetensors.torch import save_file

    from engine.models.gguf_content import GGUFModel
    from engine.models.gguf_tokenizer import read_tokenizer

    model = GGUFModel(gguf_file)
    (folder / "config.json").write_text(json.dumps(model.config, indent=2), encoding="utf-8")
    save_file(model.read_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    read_tokenizer(gguf_file, model.fields).save_pretrained(folder)


def _make_durable(folder: Path) -> None:
    """Flushed to disk, so that after a power cut the rename cannot have outlived the content; and readable by other users of the cache."""
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    folder.chmod(0o755)
