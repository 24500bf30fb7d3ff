"""A real target and a real EAGLE-3 head with a tokenizer of eight words: a real engine that loads in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    """Folders."""

    target: Path
    draft: Path


def build_pair(folder: Path) -> Pair:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from jobs.statistics.toy_pair import VOCAB, build_toy  # here, as it loads torch, and the fake engine's runs need none

    toy = build_toy(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(toy.target)
    return Pair(toy.target, toy.head)
