"""The tokenizer in a GGUF file. transformers builds its vocabulary and merges; how text is split before them is said here, by name.

Imports no torch until a tokenizer is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from engine.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def _split_words(digits: str) -> pre_tokenizers.PreTokenizer:
    """Contractions, words with the sign before them, runs of `digits`, other signs, line ends and spaces."""
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


#: tokenizer.ggml.pre of a byte-level tokenizer -> how it splits text
_SPLITS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "llama-bpe": _split_words(r"\p{N}{1,3}"),
    "qwen2": _split_words(r"\p{N}"),
}

#: of transformers -> in the file
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def check_tokenizer(file: Path, fields: Mapping[str, Any]) -> None:
    """fields: the file's metadata. Raises UserError for a tokenizer that would split text in another way than its model learned."""
    model, pre, adds_space = (fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre", "add_space_prefix"))
    for name, value, is_known, allowed in (
        ("model", model, model in ("gpt2", "llama"), "gpt2 (byte-level), llama (SentencePiece)"),
        ("pre", pre, model == "llama" or pre in _SPLITS, ", ".join(_SPLITS)),
        ("add_space_prefix", adds_space, model == "gpt2" or adds_space in (None, True), "true or not set"),
    ):
        if not is_known:
            raise UserError(f"'{file}': tokenizer.ggml.{name}={value!r}; allowed: {allowed}")


def read_tokenizer(file: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Of a file that passed `check_tokenizer`."""
    from transformers import PreTrainedTokenizerFast

    from engine.models.loading import quiet_transformers

    def get(name: str, default: Any = None) -> Any:
        return fields.get(f"tokenizer.ggml.{name}", default)

    pre, is_byte_level, tokens = get("pre"), get("model") == "gpt2", get("tokens")
    with quiet_transformers():
        built = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    layout = json.loads(built.backend_tokenizer.to_str())
    # transformers adds an unknown token where the file names none; the model has no such id
    layout["added_tokens"] = [token for token in layout["added_tokens"] if token["id"] < len(tokens)]
    backend = Tokenizer.from_str(json.dumps(layout))
    if is_byte_level:
        backend.pre_tokenizer = _SPLITS[pre]
        backend.normalizer = normalizers.NFC() if pre == "qwen2" else None
        backend.model.ignore_merges = pre == "llama-bpe"  # a word that is a token stays whole, whatever its merges say
    special = {name: get(f"{field}_token_id") for name, field in _SPECIAL.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=get("add_bos_token", not is_byte_level or pre == "llama-bpe"),  # files of Llama 3 do not say it
        add_eos_token=get("add_eos_token", False),
        chat_template=fields.get("tokenizer.chat_template"),
        **{name: None if index is None else tokens[index] for name, index in special.items()},
    )
