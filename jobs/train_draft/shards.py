"""Captured texts on disk: one safetensors file for each part of the answers, read by memory map, so that no more than a batch is in memory.

Shapes: N tokens of all texts of a file one after another, M of them in answers, F width of the features, H hidden size, D texts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

_INDEX = ("length", "answer_start", "prompt_hash")


@dataclass(frozen=True, kw_only=True)
class CapturedText:
    """One text of n tokens, the last m of which are an answer.

    token_n: int64. feature_nF: the target's. hidden_mH, log_z_m: the target's law at each token of the answer: its last hidden state
    after the final norm, and the log of the sum of exp(logits), fp32.
    prompt_hash: the same for the same prompt.
    """

    token_n: Tensor
    feature_nF: Tensor
    hidden_mH: Tensor
    log_z_m: Tensor
    prompt_hash: int

    @property
    def answer_start(self) -> int:
        return len(self.token_n) - len(self.hidden_mH)


def write_shard(path: Path, texts: Sequence[CapturedText]) -> None:
    """The whole file or none of it."""
    lengths = [(len(text.token_n), text.answer_start, text.prompt_hash) for text in texts]
    tensors = {name: torch.tensor(column, dtype=torch.int64) for name, column in zip(_INDEX, zip(*lengths, strict=True), strict=True)}
    for name, parts in (
        ("token", [text.token_n.int() for text in texts]),
        ("feature", [text.feature_nF for text in texts]),
        ("hidden", [text.hidden_mH for text in texts]),
        ("log_z", [text.log_z_m for text in texts]),
    ):
        tensors[name] = torch.cat(parts).contiguous()
    staged = path.with_suffix(".part")
    save_file(tensors, staged)
    os.replace(staged, path)


class Corpus:
    """All texts of a folder of shards. lengths_D, answer_starts_D, prompt_hashes_D: of each."""

    def __init__(self, folder: Path):
        self._files = [safetensors.safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        columns = {name: [file.get_tensor(name).numpy() for file in self._files] for name in _INDEX}
        self._shard_D = np.repeat(np.arange(len(self._files)), [len(lengths) for lengths in columns["length"]])
        self._start_D = np.concatenate([np.cumsum(lengths) - lengths for lengths in columns["length"]])
        answers = [lengths - starts for lengths, starts in zip(columns["length"], columns["answer_start"], strict=True)]
        self._law_start_D = np.concatenate([np.cumsum(lengths) - lengths for lengths in answers])
        self.length_D, self.answer_start_D, self.prompt_hash_D = (np.concatenate(columns[name]) for name in _INDEX)

    def __len__(self) -> int:
        return len(self.length_D)

    def token(self, text: int) -> Tensor:
        """int64 [n]."""
        return self._read("token", text, self._start_D, 0, int(self.length_D[text])).long()

    def feature(self, text: int, stop: int) -> Tensor:
        """[stop, F], of the first `stop` tokens."""
        return self._read("feature", text, self._start_D, 0, stop)

    def law(self, text: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(hidden [., H], log_z [.]) at tokens start to stop of the text, which are of the answer."""
        first = int(self.answer_start_D[text])
        hidden, log_z = (self._read(name, text, self._law_start_D, start - first, stop - first) for name in ("hidden", "log_z"))
        return hidden, log_z

    def _read(self, name: str, text: int, start_D: np.ndarray, start: int, stop: int) -> Tensor:
        offset = int(start_D[text])
        return self._files[self._shard_D[text]].get_slice(name)[offset + start : offset + stop]
