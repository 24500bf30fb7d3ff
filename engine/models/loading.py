"""Loads a target's weights and tokenizer from a model folder, strictly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import safetensors
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers import modeling_gguf_pytorch_utils as gguf_utils
from transformers.utils import logging as transformers_logging

from engine.errors import UserError
from engine.models.folder import check_target_config, find_weights, read_config


def load_causal_lm(path: Path, dtype: torch.dtype, device: torch.device | str) -> LlamaForCausalLM:
    """The model in folder `path`, in eval mode and without gradients.

    Raises UserError when the architecture is not Llama's, or a tensor is missing, unknown or misshapen: each by its name, with the
    shapes of both the file and config.json.
    """
    check_target_config(read_config(path), path)
    file = find_weights(path)
    try:
        with quiet_transformers():
            model, report = LlamaForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=True, ignore_mismatched_sizes=True, output_loading_info=True
            )
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"target '{path}': '{file.name}' cannot be read: {str(error).splitlines()[0]}") from None
    for name, in_file, expected in sorted(report["mismatched_keys"]):
        raise UserError(f"target '{path}': {name} has shape {list(in_file)}; allowed: {list(expected)}, by config.json")
    for kind, names in (("missing", report["missing_keys"]), ("unknown", report["unexpected_keys"])):
        if names:
            raise UserError(f"target '{path}': {kind} tensors: {', '.join(sorted(names))}")
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in folder `path`, with its chat template if it has one. Raises UserError when there is none."""
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"target '{path}': its tokenizer cannot be loaded: {str(error).splitlines()[0]}") from None


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, templated: bool) -> list[int]:
    """Token ids of a prompt, with one BOS at most.

    Text from a chat template carries all its special tokens already, so none are added. Raw text gets those that the tokenizer itself
    adds (Llama-3: a BOS; SmolLM2: none), unless it begins with the BOS as text.
    """
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return tokenizer(text, add_special_tokens=not (templated or has_bos), return_attention_mask=False)["input_ids"]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' progress bars and advice off stderr; errors still raise. What was set before is put back."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with ExitStack() as stack:
        stack.callback(transformers_logging.set_verbosity, verbosity)
        if had_bars:
            stack.callback(transformers_logging.enable_progress_bar)
        # the GGUF reader's bar is not under transformers' switch
        stack.callback(setattr, gguf_utils, "tqdm", gguf_utils.tqdm)
        gguf_utils.tqdm = partial(gguf_utils.tqdm, disable=True)
        yield
