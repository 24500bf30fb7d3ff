"""The target's features and laws over texts, once, in a file for each part of the answers.

Shapes: N tokens of several texts one after another, H hidden size, F width of the features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.encoding import encode_text
from engine.models.loading import load_causal_lm, load_tokenizer
from engine.models.source import resolve_target
from engine.options import resolve_device, resolve_dtype
from engine.target import Target
from jobs.train_draft.held_out import hash_prompt
from jobs.train_draft.shards import CapturedText, write_shard

MIN_ANSWER = 3  # tokens: one comes with the prompt's pass, one is drafted, and nothing is drafted after the last
_PASS_TOKENS = 4096
_LAW_TOKENS = 256  # whose logits are in memory at once


class _Text(NamedTuple):
    token_ids: list[int]
    answer_start: int
    prompt_hash: int


class Capture:
    """Args:
    target, revision, dtype, device: of the model. feature_layers: whose inputs are the features. max_tokens: of a text.
    threads: of torch; None leaves them.
    """

    def __init__(
        self,
        *,
        target: str,
        revision: str | None,
        dtype: str,
        device: str,
        feature_layers: tuple[int, ...],
        max_tokens: int,
        threads: int | None,
    ):
        if threads is not None:
            torch.set_num_threads(threads)
        resolved = resolve_target(target, revision)
        on = resolve_device(device)
        self._target = Target(load_causal_lm(resolved.path, resolve_dtype(dtype, on, reproducible=False), on), feature_layers)
        self._tokenizer = load_tokenizer(resolved.path, resolved.chat_template)
        self._max_tokens = max_tokens

    def write(self, part: Path, shard: Path) -> dict[str, int]:
        """Captures one part of the answers. Returns the numbers of texts and tokens, and of rows left out."""
        table = pq.read_table(part, columns=["status", "prompt", "num_prompt_tokens", "token_ids"])
        texts, num_left_out = [], 0
        for row in table.to_pylist():
            text = self._encode(row)
            texts += [text] if text else []
            num_left_out += text is None
        if texts:
            write_shard(shard, [captured for some in _passes(texts) for captured in self._run(some)])
        return {"texts": len(texts), "tokens": sum(len(text.token_ids) for text in texts), "left_out": num_left_out}

    def _encode(self, row: dict) -> _Text | None:
        """None for a row that gives nothing to learn from."""
        if row["status"] != "ok" or len(row["token_ids"]) < MIN_ANSWER:
            return None
        for templated in (True, False):
            prompt = encode_text(self._tokenizer, row["prompt"], templated=templated)
            if len(prompt) == row["num_prompt_tokens"]:
                break
        else:  # a prompt that spells special tokens as text, which its text alone does not tell
            return None
        token_ids = (prompt + row["token_ids"])[: self._max_tokens]
        return _Text(token_ids, len(prompt), hash_prompt(row["prompt"])) if len(token_ids) >= len(prompt) + MIN_ANSWER else None

    @torch.inference_mode()
    def _run(self, texts: Sequence[_Text]) -> Iterator[CapturedText]:
        lengths = [len(text.token_ids) for text in texts]
        token_N = torch.tensor([token for text in texts for token in text.token_ids], device=self._target.device)
        position_N = torch.cat([torch.arange(length) for length in lengths]).to(token_N.device)
        hidden_NH, feature_NF = self._target.forward(token_N, position_N, _causal(lengths))
        for text, hidden_nH, feature_nF in zip(texts, hidden_NH.split(lengths), feature_NF.split(lengths), strict=True):
            hidden_mH = hidden_nH[text.answer_start :]
            log_z = [self._target.logits(some).logsumexp(-1) for some in hidden_mH.split(_LAW_TOKENS)]
            yield CapturedText(
                token_n=torch.tensor(text.token_ids),
                feature_nF=feature_nF.cpu(),
                hidden_mH=hidden_mH.cpu(),
                log_z_m=torch.cat(log_z).cpu(),
                prompt_hash=text.prompt_hash,
            )


def _passes(texts: Sequence[_Text]) -> Iterator[list[_Text]]:
    """Texts whose tokens fit into one pass together, or one that does not fit."""
    some: list[_Text] = []
    for text in texts:
        if some and sum(len(one.token_ids) for one in some) + len(text.token_ids) > _PASS_TOKENS:
            yield some
            some = []
        some.append(text)
    if some:
        yield some


def _causal(lengths: Sequence[int]):
    """Attention of texts that stand one after another, each to itself."""

    def attend(layer: int, query_NAD: Tensor, key_NGD: Tensor, value_NGD: Tensor, scale: float) -> Tensor:
        outs = []
        for parts in zip(*(x.split(lengths) for x in (query_NAD, key_NGD, value_NGD)), strict=True):
            query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in parts)
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
            outs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outs)

    return attend
