"""Turns the GGUF file of a preset into an ordinary model folder, once per machine. Imports torch only to convert.

The folder lives in the cache under the content's hash, so another file, or another version of this converter, never meets an old result.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from engine.errors import UserError

logger = logging.getLogger(__name__)

CONVERTER_VERSION = 1  # raise it when a change below changes what is written
GGUF_MAGIC = b"GGUF"


def cache_folder() -> Path:
    """Where converted models are kept: $RHEO_CACHE, else $XDG_CACHE_HOME/rheo, else ~/.cache/rheo."""
    if os.environ.get("RHEO_CACHE"):
        return Path(os.environ["RHEO_CACHE"]).expanduser()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "rheo"
    return Path.home() / ".cache" / "rheo"


def converted_folder(gguf_file: Path) -> Path:
    """Where the conversion of `gguf_file` is or will be; its content is hashed (0.1 s per 100 MB)."""
    with gguf_file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return cache_folder() / "models" / f"{gguf_file.stem}-{digest[:16]}-v{CONVERTER_VERSION}"


def check_gguf(gguf_file: Path) -> None:
    """Raises UserError when `gguf_file` is no GGUF file, or has to be converted and the packages for that are missing."""
    try:
        with gguf_file.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise UserError(f"'{gguf_file}' cannot be read: {error.strerror}") from None
    if magic != GGUF_MAGIC:
        raise UserError(f"'{gguf_file}' is no GGUF file: it begins with {magic!r}, not {GGUF_MAGIC!r}")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing and not converted_folder(gguf_file).is_dir():
        raise UserError(f"reading '{gguf_file}' needs the packages {', '.join(missing)}: pip install 'rheo[gguf]'")


def convert_gguf(gguf_file: Path) -> Path:
    """The model folder (safetensors, configuration, tokenizer) made from `gguf_file`, converted now if it is not in the cache.

    Processes that start at once convert once: one holds the lock, the others wait for its result. The folder appears by a rename, so a
    conversion that was cut short is never used. Raises UserError when the cache cannot be written.
    """
    folder = converted_folder(gguf_file)
    if folder.is_dir():  # without the lock, so a cache can be read-only
        return folder
    check_gguf(gguf_file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):  # of a run that died; nobody else writes under this lock
                    shutil.rmtree(leftover)
                logger.warning("converting %s once into %s (about half a minute)", gguf_file.name, folder)
                unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
                _write_model(gguf_file, unfinished)
                _make_durable(unfinished)
                unfinished.rename(folder)
    except OSError as error:
        raise UserError(f"the model cache '{folder.parent}' cannot be written ({error}); set RHEO_CACHE to a folder that can") from None
    return folder


def _write_model(gguf_file: Path, folder: Path) -> None:
    """Loads `gguf_file` through transformers and writes it to `folder` as a plain Llama model.

    The weights are kept in fp32, 540 MB: dequantised Q4_1 values (fp16 scale * 4-bit integer + fp16 minimum) do not fit in 16 bits.
    Measured on SmolLM2-135M: bf16 would change 82% of the values, by up to 0.014 (fp16: up to 0.002).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from engine.models.loading import quiet_transformers

    with quiet_transformers():
        source = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
        fields = source.config.to_dict()
        for name in ("quantization_config", "_model_name_or_path", "model_type", "transformers_version"):
            fields.pop(name, None)
        # save_pretrained refuses a model that says it is quantised, though its tensors no longer are
        with torch.device("meta"):
            plain = LlamaForCausalLM(LlamaConfig(**fields))
        plain.load_state_dict(source.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = source.generation_config
        plain.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
        _restore_pre_tokenizer(tokenizer, gguf_file)
        tokenizer.save_pretrained(folder)


def _restore_pre_tokenizer(tokenizer, gguf_file: Path) -> None:
    """transformers reads every byte-level GGUF tokenizer as GPT-2's; SmolLM's splits off each digit first.

    Example: "x=  10" is x, =, two spaces as one token, 1, 0; without this the two spaces are two tokens.
    """
    import gguf
    from tokenizers import pre_tokenizers

    field = gguf.GGUFReader(gguf_file).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _make_durable(folder: Path) -> None:
    """Flushed to disk, so that after a power cut the rename cannot have outlived the content; and readable by other users of the cache."""
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    folder.chmod(0o755)
