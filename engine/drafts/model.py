"""What every draft offers to growth: laws over a part of the target's vocabulary, after a row's text and after each drafted node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.kv_cache import KVCache
from engine.law.growth import Expand
from engine.row import Row


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where growth begins.

    logits_BU: for each root's children; rows that do not draft have numbers without a meaning there.
    target_token_U: the target's id of each draft id, injective.
    expand: the draft, one level further at a time.
    """

    logits_BU: Tensor
    target_token_U: Tensor
    expand: Expand


class DraftModel(Protocol):
    """caches: keys and values in the engine's pages; of row b the first `num_draft_cached` places hold the text itself, and never a
    drafted token: what growth puts behind them is overwritten by the next cycle (FIELD-CASES B18).
    feature_layers: the target's layers whose inputs the draft reads, as `Row.pending_TF`.
    trained_length: tokens of the longest text that it was trained for, if it says so. Behind them it drafts badly, and rows stay right.
    """

    caches: Sequence[KVCache]
    feature_layers: tuple[int, ...]
    trained_length: int | None

    def begin(self, rows: Sequence[Row]) -> Start | None:
        """Read what the rows' texts have that the draft has not seen; None where there was nothing."""
        ...
