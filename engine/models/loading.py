"""Loads a language model's weights and tokenizer from a model folder, strictly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from engine.errors import UserError
from engine.models.folder import BROKEN_FILE, check_target_config, find_weights, read_config
from engine.models.tensor_names import check_pickled_weights


def load_causal_lm(path: Path, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """The model in folder `path`, a target or a draft, in eval mode and without gradients.

    Old checkpoints hold the rotary frequencies of each layer (rotary_emb.inv_freq); they are computed anew from config.json.
    Raises UserError when the architecture is not one of `folder.ARCHITECTURES`, or a tensor is missing, unknown or misshapen: each by its
    name, with the shapes of both the file and config.json.
    """
    check_target_config(read_config(path), path)
    file = find_weights(path)
    try:
        with quiet_transformers():
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                weights_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (StrictDataclassError, *BROKEN_FILE) as error:
        said = " ".join(str(error).split()).partition(". ")[0]
        raise UserError(f"model '{path}': config.json or '{file.name}' cannot be read: {type(error).__name__}: {said}") from None
    except (AttributeError, TypeError):
        check_pickled_weights(path)  # what transformers says of them helps nobody
        raise
    for name, in_file, expected in sorted(report["mismatched_keys"]):
        raise UserError(f"model '{path}': {name} has shape {list(in_file)}; allowed: {list(expected)}, by config.json")
    for kind, names in (("missing", report["missing_keys"]), ("unknown", report["unexpected_keys"])):
        if names:
            raise UserError(f"model '{path}': {kind} tensors: {', '.join(sorted(names))}")
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(path: Path, chat_template: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in folder `path`, with its chat template if it has one.

    chat_template: a file, in place of the folder's own template.
    Raises UserError when there is no tokenizer, it cannot be loaded, or it has no fast form (which offsets and special tokens need).
    """
    # tokenizer.json is the tokenizer; the class that tokenizer_config.json names would rebuild its splitting by rules of its own
    kind = PreTrainedTokenizerFast if (path / "tokenizer.json").is_file() else AutoTokenizer
    try:
        with quiet_transformers():
            tokenizer = kind.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"model '{path}': its tokenizer cannot be loaded: {str(error).strip().splitlines()[0]}") from None
    if not tokenizer.is_fast:
        raise UserError(f"model '{path}': its tokenizer is a {type(tokenizer).__name__} in Python; allowed: one of the tokenizers library")
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    return tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' progress bars and advice off stderr; errors still raise. What was set before is put back."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
