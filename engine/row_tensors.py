"""The sampling parameters of a running batch as tensors, and the target's law at the nodes that verification visits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.law.draws import KeyedDraws
from engine.law.probabilities import Filters, probabilities, process_logits, softmax_at
from engine.row import Row

#: parameter -> the value that switches it off
_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "eta": 0.0}

#: parameters are any numbers; beyond these limits fp32 would make 0, inf, and then NaN of them, and of a product of two (18 + 18 < 38)
_SMALLEST, _LARGEST, _LARGEST_INT = 1e-18, 1e18, 2**62


@dataclass(frozen=True, kw_only=True)
class DraftTensors:
    """What a draft reads of some rows of a batch; names as in `RowTensors`."""

    cycle_B: Tensor
    position_B: Tensor
    temperature_B: Tensor
    draws: KeyedDraws


class RowTensors:
    """Keys, counters and sampling parameters of the rows of a batch.

    position_B: the output position that the next token fills.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        vocab_size: int,
        device: torch.device,
        make_draws: Callable[[Tensor], KeyedDraws],
        softmax: Callable[[Tensor, Tensor], Tensor] = softmax_at,
    ):
        self._rows, self._device = rows, device
        self._softmax = softmax
        self.cycle_B = self._column([row.num_cycles for row in rows])
        self.position_B = self._column([row.num_output_tokens for row in rows])
        self.temperature_B = self._floats(row.params.temperature for row in rows)
        self._make_draws = make_draws
        self.draws = make_draws(self._column([row.key for row in rows]))
        used = {name: self._used(name, off) for name, off in _FILTERS.items()}
        self._filters = Filters(temperature_B=self.temperature_B, **{f"{name}_B": values for name, values in used.items()})
        self._repetition_penalty_B = self._used("repetition_penalty", 1.0)
        self._min_tokens_B = self._column([min(row.params.min_tokens, _LARGEST_INT) for row in rows])
        self._seen_BV, self._bias_BV, self._stop_BV = self._seen(vocab_size), self._bias(vocab_size), self._stop(vocab_size)

    def narrow(self, first: int, end: int) -> DraftTensors:
        """Of the rows from `first` up to `end`."""
        return DraftTensors(
            cycle_B=self.cycle_B[first:end],
            position_B=self.position_B[first:end],
            temperature_B=self.temperature_B[first:end],
            draws=self._make_draws(self._column([row.key for row in self._rows[first:end]])),
        )

    def _column(self, values: list, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _floats(self, values: Iterable[float]) -> Tensor:
        limited = [math.copysign(min(max(abs(value), _SMALLEST), _LARGEST), value) if value else 0.0 for value in values]
        return self._column(limited, torch.float32)

    def _used(self, name: str, off: float) -> Tensor | None:
        values = [getattr(row.params, name) for row in self._rows]
        if all(value == off for value in values):
            return None
        return self._column([min(value, _LARGEST_INT) for value in values]) if isinstance(off, int) else self._floats(values)

    def law(self, logits_BV: Tensor, position_B: Tensor, path_BV: Tensor | None) -> Tensor:
        """p [B, V] at one node of each row. path_BV: tokens on the path from the root to the node, the node included (None: the root)."""
        seen_BV, early_B = self._seen_BV, position_B < self._min_tokens_B
        if seen_BV is not None and path_BV is not None:
            seen_BV = seen_BV | path_BV
        logits_BV = process_logits(
            logits_BV,
            bias_BV=self._bias_BV,
            repetition_penalty_B=self._repetition_penalty_B,
            seen_BV=seen_BV,
            banned_BV=None if self._stop_BV is None else self._stop_BV & early_B.unsqueeze(-1),
        )
        return probabilities(logits_BV, self._filters, self._softmax)

    @property
    def reads_path(self) -> bool:
        return self._repetition_penalty_B is not None

    def _seen(self, vocab_size: int) -> Tensor | None:
        """Tokens of the prompt and the output, where the repetition penalty reads them."""
        if self._repetition_penalty_B is None:
            return None
        none_V = torch.zeros(vocab_size, dtype=torch.bool, device=self._device)
        for row in self._rows:
            if row.params.repetition_penalty != 1.0 and row.seen_V is None:
                row.seen_V = none_V.clone()
                row.seen_V[self._column(row.tokens)] = True
        return torch.stack([none_V if row.seen_V is None else row.seen_V for row in self._rows])

    def _bias(self, vocab_size: int) -> Tensor | None:
        if not any(row.params.logit_bias for row in self._rows):
            return None
        none_V = torch.zeros(vocab_size, device=self._device)
        for row in self._rows:
            if row.params.logit_bias and row.bias_V is None:
                row.bias_V = none_V.clone()
                row.bias_V[self._column(list(row.params.logit_bias))] = self._floats(row.params.logit_bias.values())
        return torch.stack([none_V if row.bias_V is None else row.bias_V for row in self._rows])

    def _stop(self, vocab_size: int) -> Tensor | None:
        """Stop ids and EOS, where a row has not come to its min_tokens yet."""
        if not any(row.num_output_tokens < row.params.min_tokens for row in self._rows):
            return None
        stop_BV = torch.zeros(len(self._rows), vocab_size, dtype=torch.bool, device=self._device)
        for index, row in enumerate(self._rows):
            stop_BV[index, self._column(list(row.stop_ids))] = True
        return stop_BV
