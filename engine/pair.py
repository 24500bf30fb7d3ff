"""A target and its draft: found by name, loaded once, shared by as many engines as are wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from engine.drafts.loading import load_draft
from engine.drafts.model import DraftModel
from engine.errors import EngineError
from engine.heap import keep_freed_memory
from engine.models.loading import load_causal_lm, load_tokenizer
from engine.models.presets import Preset
from engine.models.source import ResolvedDraft, ResolvedTarget, resolve_draft, resolve_target, resolve_topology
from engine.options import check_attention, resolve_device, resolve_dtype, tell_of_kernels
from engine.params import Speculation
from engine.target import Target
from engine.topology import Topology, read_topology


@dataclass(frozen=True, kw_only=True)
class FoundPair:
    """What is to be loaded, and how; every "auto" is resolved. draft: None without speculation."""

    target: ResolvedTarget
    draft: ResolvedDraft | None
    dtype: torch.dtype
    device: torch.device
    attention: str

    def settle(self, speculation: Speculation) -> tuple[Speculation, Topology | None]:
        """With the preset's tree_size and depth where there are none, and the topology of the method `static`.

        Raises UserError for a topology that cannot be had.
        """
        preset: Preset | None = self.target.preset
        settled = speculation.with_tree() if preset is None else speculation.with_tree(preset.tree_size, preset.depth)
        if speculation.method != "static":
            return settled, None
        return settled, read_topology(resolve_topology(speculation.topology, preset))

    def load(self) -> Pair:
        """Raises UserError where a checkpoint is wrong, EngineError where there is no memory for it."""
        if self.device.type == "cpu":
            keep_freed_memory()
        try:
            model = load_causal_lm(self.target.path, self.dtype, self.device)
            make_draft = None if self.draft is None else load_draft(self.draft, model, attention=self.attention)
        except torch.OutOfMemoryError as error:
            hint = "take a smaller model.dtype or model"
            what = f"'{self.target.name}' was loaded in {self.dtype} on {self.device}"
            raise EngineError(f"out of memory while {what}; {hint} ({error})") from error
        return Pair(
            found=self,
            target=Target(model, make_draft().feature_layers if make_draft else ()),
            make_draft=make_draft,
            tokenizer=load_tokenizer(self.target.path, self.target.chat_template),
        )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Loaded weights. target: gives the features that the draft reads. make_draft: one with caches of its own, over the same weights."""

    found: FoundPair
    target: Target
    make_draft: Callable[[], DraftModel] | None
    tokenizer: PreTrainedTokenizerBase


def find_pair(
    target: str | Path,
    draft: str | Path = "auto",
    *,
    method: str,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    max_model_len: int | None = None,
    reproducible: bool = False,
) -> FoundPair:
    """Names and options resolved; arguments as of `Engine.load`. method: of `speculation`; "off" looks for no draft.

    Raises UserError for a name or an option that is wrong. Loads nothing.
    """
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device, reproducible=reproducible)
    check_attention(attention)
    tell_of_kernels(torch_dtype, torch_device)
    resolved = resolve_target(str(target), revision, max_model_len)
    return FoundPair(
        target=resolved,
        draft=resolve_draft(str(draft), resolved.preset, method, resolved.path),
        dtype=torch_dtype,
        device=torch_device,
        attention=attention,
    )
