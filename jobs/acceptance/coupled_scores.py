"""The scales of the coupled method's scores: under which values the target's own draws are likeliest (LAW.md section 7, Tree scores).

    python -m jobs.acceptance.coupled_scores out/smollm2-draft/features engine/models/smollm2-eagle3

At places of held-out texts that `rheo train-draft` has captured, y is drawn from the target with coupled noise g, and the draft tells
log q, on several of its own steps. Over the places where the draft knows y, scale and noise_scale maximise the mean of
    scale * log q(y) + noise_scale * g(y) - log sum_x exp(scale * log q(x) + noise_scale * g(x)).
What came out, and how often y is among the best K, goes to jobs/results/coupled_scores.json.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.law.draws import KeyedDraws, smallest_argmax
from engine.law.keys import row_key
from engine.models.checkpoint import load_eagle3
from engine.models.loading import load_causal_lm
from engine.models.source import resolve_target
from jobs.evidence import write_result
from jobs.train_draft.batches import Batches
from jobs.train_draft.held_out import is_held_out
from jobs.train_draft.shards import Corpus
from jobs.train_draft.unroll import Unroll

_STEPS = 6
_BATCH, _QUERIES = 8, 8
_TOP = (1, 4, 10)
_ITERATIONS = 50


class Places(NamedTuple):
    """log q and noise of the draft's U tokens at N places, and the draft's id of y, which is -1 where the draft does not know it."""

    log_q_NU: Tensor
    noise_NU: Tensor
    y_N: Tensor

    @classmethod
    def join(cls, parts: Sequence[Places]) -> Places:
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def values(self, scales_2: Tensor) -> Tensor:
        return (scales_2[0] * self.log_q_NU + scales_2[1] * self.noise_NU).log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path, help="of a run of rheo train-draft")
    parser.add_argument("draft", type=Path)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--validation", type=float, default=0.03, help="share of the prompts that were held out")
    parser.add_argument("--batches", type=int, default=24, help=f"of {_BATCH * _QUERIES} places")
    args = parser.parse_args()
    with torch.no_grad():
        steps = [Places.join(parts) for parts in zip(*_read(args), strict=True)]
    by_step = {step: _fit(places) for step, places in enumerate(steps, 1)}
    write_result("coupled_scores", {"draft": str(args.draft), "all": _fit(Places.join(steps)), "by_step": by_step})


def _read(args: argparse.Namespace) -> Iterator[list[Places]]:
    """Of each batch, for each step of the draft on its own features."""
    target = load_causal_lm(resolve_target(args.target, None).path, torch.float32, torch.device("cpu"))
    target_head_VH = target.get_output_embeddings().weight
    embedding_VH = target.get_input_embeddings().weight
    head = load_eagle3(args.draft, target_config=target.config, embedding=embedding_VH, dtype=torch.float32, device="cpu")
    unroll = Unroll(head, torch.ones(head.fc.in_features))
    corpus = Corpus(args.features)
    texts = np.flatnonzero(is_held_out(corpus.prompt_hash_D, args.validation))
    batches = Batches(corpus, texts, batch=_BATCH, queries=_QUERIES, steps=_STEPS, seed=1)
    draft_id_V = torch.full((len(target_head_VH),), -1).index_put_((head.d2t,), torch.arange(len(head.d2t)))
    rows = itertools.count()
    for windows in batches.epoch(0)[: args.batches]:
        batch = batches.read(windows)
        places = []
        for step, output_NH in enumerate(unroll(batch, _STEPS).flatten(1, 2)):
            compared = slice(step, step + _QUERIES)
            exists_N = batch.exists_BT[:, compared].flatten()
            logit_NV = batch.hidden_BTH[:, compared].flatten(0, 1)[exists_N].float() @ target_head_VH.T
            draws = KeyedDraws(torch.tensor([row_key(0, str(next(rows)), 0) for _ in logit_NV]))
            noise_NV = draws.noise(torch.zeros(len(logit_NV), dtype=torch.int64), logit_NV.shape[1])
            y_N = draft_id_V[smallest_argmax(logit_NV + noise_NV)]
            places.append(Places((output_NH[exists_N] @ head.lm_head.weight.T).log_softmax(-1), noise_NV[:, head.d2t], y_N))
        yield places


def _fit(places: Places) -> dict[str, float]:
    known = Places(*(column[places.y_N >= 0] for column in places))
    scales_2 = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.LBFGS([scales_2], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -known.values(scales_2).gather(1, known.y_N.unsqueeze(1)).mean()
        value.backward()
        return value

    optimizer.step(loss)
    fitted_2 = scales_2.detach()
    return {
        "places": len(places.y_N),
        "known": round(len(known.y_N) / len(places.y_N), 4),
        "scale": round(fitted_2[0].item(), 3),
        "noise_scale": round(fitted_2[1].item(), 3),
        "fitted": _quality(known, fitted_2),
        "unscaled": _quality(known, torch.ones(2)),
    }


def _quality(known: Places, scales_2: Tensor) -> dict[str, float]:
    value_NU = known.values(scales_2)
    value_N1 = value_NU.gather(1, known.y_N.unsqueeze(1))
    rank_N = (value_NU > value_N1).sum(-1)
    return {
        "log_loss": round(-value_N1.mean().item(), 4),
        **{f"in_top_{num}": round((rank_N < num).float().mean().item(), 4) for num in _TOP},
    }


if __name__ == "__main__":
    main()
