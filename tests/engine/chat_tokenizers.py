"""Small tokenizers that treat special tokens, spaces and BOS as those of Llama 3, Vicuna and Qwen3 do, with templates of the same kind.

A twin has the same ids, but other names for its special tokens. So to a twin the usual names are text, by its ordinary rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_WORDS = ("the", "river", "start", "end", "hello", "system", "user", "im", "say", "eot", "begin", "text")

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
VICUNA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }} "
    "{% elif message['role'] == 'user' %}USER: {{ message['content'] }} "
    "{% elif message['role'] == 'assistant' %}ASSISTANT: {{ message['content'] }}</s>"
    "{% else %}{{ raise_exception('no role ' + message['role']) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
QWEN3 = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def llama3(*, twin: bool = False) -> PreTrainedTokenizerFast:
    """Bytes; a BOS in front of raw text; a template that writes it, and trims."""
    special = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
    tokenizer = _add_special(_byte_level(), special, twin=twin)
    bos = _name(special[0], twin)
    add_bos = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), add_bos])
    return _finish(tokenizer, LLAMA3, special, twin=twin, bos_token=bos, eos_token=_name("<|eot_id|>", twin))


def qwen3(*, twin: bool = False) -> PreTrainedTokenizerFast:
    """Bytes; no BOS; <think> and the like are added tokens, but not special ones."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = _add_special(_byte_level(), special, twin=twin)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    return _finish(tokenizer, QWEN3, special, twin=twin, eos_token=_name("<|im_end|>", twin))


def vicuna(*, twin: bool = False, spaces: str = "first", **rules: Any) -> PreTrainedTokenizerFast:
    """Pieces whose spaces are "▁", bytes for what they lack, and a BOS that the template writes too.

    spaces: where a "▁" is put in front: of the "first" piece, "always" after a special token, "never", or by a "normalizer".
    rules: of the special tokens (lstrip, rstrip, normalized, single_word).
    """
    alphabet = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(_bpe(alphabet, [f"▁{word}" for word in _WORDS] + ["▁▁"], byte_fallback=True, fuse_unk=True))
    if spaces == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spaces, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ("<s>", "</s>")
    _add_special(tokenizer, special, twin=twin, **rules)
    bos = _name("<s>", twin)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    return _finish(tokenizer, VICUNA, special, twin=twin, bos_token=bos, eos_token=_name("</s>", twin))


def _byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(_bpe(alphabet, [start + word for start in ("Ġ", "") for word in _WORDS]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bpe(alphabet: Iterable[str], words: Iterable[str], **options: Any) -> models.BPE:
    """Every word is put together from its left end."""
    vocab = {symbol: id for id, symbol in enumerate(alphabet)}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    return models.BPE(vocab, merges, **options)


def _name(special: str, twin: bool) -> str:
    return f"@{special.strip('<|>/')}{len(special)}@" if twin else special


def _add_special(tokenizer: Tokenizer, special: Iterable[str], *, twin: bool, **rules: Any) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(_name(name, twin), **{"normalized": False, **rules}) for name in special])
    return tokenizer


def _finish(tokenizer: Tokenizer, template: str, special: Iterable[str], *, twin: bool, **named: str) -> PreTrainedTokenizerFast:
    for name in special:
        template = template.replace(name, _name(name, twin))
    finished = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)
    finished.chat_template = template
    return finished
