"""Loads the draft that a job names, beside its target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel

from engine.drafts.causal_lm import CausalLMDraft
from engine.drafts.eagle3 import Eagle3Draft
from engine.drafts.model import DraftModel
from engine.drafts.ngram import NgramDraft
from engine.models.checkpoint import load_eagle3
from engine.models.loading import load_causal_lm
from engine.models.source import ResolvedDraft
from engine.target import Target


def load_draft(draft: ResolvedDraft, target: PreTrainedModel, *, attention: str) -> Callable[[], DraftModel]:
    """In the target's dtype, on its device: a function that makes drafts over the same weights, each with caches of its own.

    Raises UserError where the checkpoint is wrong or does not fit.
    """
    if draft.kind == "ngram":
        return partial(NgramDraft, target.device)
    if draft.kind == "causal_lm":
        model = Target(load_causal_lm(draft.path, target.dtype, target.device))
        return partial(CausalLMDraft, model, attention=attention, num_target_tokens=target.config.vocab_size)
    head = load_eagle3(
        draft.path,
        target_config=target.config,
        embedding=target.get_input_embeddings().weight,
        dtype=target.dtype,
        device=target.device,
    )
    return partial(Eagle3Draft, head, attention=attention)
