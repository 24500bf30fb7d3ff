"""Packing: rows with different numbers of new tokens become one flat batch of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.new_tokens import NewTokens

#: causal runs longer than this are attended one by one, so that they do not pad the others
LONG_RUN = 64


@dataclass(frozen=True, kw_only=True)
class Packed:
    """N packed tokens. index_BQ: where in the pack the j-th token of row b stands; last_B: the last token of each row."""

    token_N: Tensor
    position_N: Tensor
    index_BQ: Tensor
    last_B: Tensor
    new: NewTokens


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Tokens of B rows, padded to Q. depth_BQ: position behind the prefix. visible_BQQ: which of the row's new tokens each one sees."""

    token_BQ: Tensor
    depth_BQ: Tensor
    exists_BQ: Tensor
    visible_BQQ: Tensor


def pad_runs(runs: Sequence[Sequence[int]], device: torch.device) -> tuple[Padded, list[tuple[int, Sequence[int]]]]:
    """Causal runs of tokens, one a row (empty: none); the long ones apart, as (row, tokens)."""
    long = [(row, run) for row, run in enumerate(runs) if len(run) > LONG_RUN]
    short = [() if len(run) > LONG_RUN else run for run in runs]
    width = max(map(len, short), default=0)
    index_Q = torch.arange(width, device=device)
    exists_BQ = index_Q < torch.tensor([len(run) for run in short], device=device).unsqueeze(-1)
    token_BQ = torch.zeros(len(runs), width, dtype=torch.long, device=device)
    token_BQ[exists_BQ] = torch.tensor([token for run in short for token in run], dtype=torch.long, device=device)
    causal_QQ = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    padded = Padded(
        token_BQ=token_BQ,
        depth_BQ=index_Q.expand_as(token_BQ),
        exists_BQ=exists_BQ,
        visible_BQQ=causal_QQ.expand(len(runs), -1, -1),
    )
    return padded, long


def merge(first: Padded, second: Padded) -> Padded:
    """Rows of `first` where `second` has no tokens, and of `second` where it has."""
    width = max(first.token_BQ.shape[1], second.token_BQ.shape[1])
    takes_second_B1 = second.exists_BQ.any(-1, keepdim=True)

    def choose(a: Tensor, b: Tensor) -> Tensor:
        pad = [
            torch.nn.functional.pad(x, [0, width - x.shape[1]] if x.ndim == 2 else [0, width - x.shape[2], 0, width - x.shape[1]])
            for x in (a, b)
        ]
        return torch.where(takes_second_B1 if a.ndim == 2 else takes_second_B1.unsqueeze(-1), pad[1], pad[0])

    return Padded(
        token_BQ=choose(first.token_BQ, second.token_BQ),
        depth_BQ=choose(first.depth_BQ, second.depth_BQ),
        exists_BQ=choose(first.exists_BQ, second.exists_BQ),
        visible_BQQ=choose(first.visible_BQQ, second.visible_BQQ),
    )


def pack(padded: Padded, long: Sequence[tuple[int, Sequence[int]]], prefix_B: Tensor, table_BP: Tensor) -> Packed:
    """The tokens that exist, row by row, then the long runs.

    Args:
        prefix_B: committed tokens of each row. table_BP: its pages.
    """
    device = prefix_B.device
    count_B = padded.exists_BQ.sum(-1)
    end_B = count_B.cumsum(0)
    start_B = end_B - count_B
    index_BQ = (start_B.unsqueeze(-1) + torch.arange(padded.token_BQ.shape[1], device=device)).clamp(min=0)
    last_B = (end_B - 1).clamp(min=0)
    tokens = [padded.token_BQ[padded.exists_BQ]]
    positions = [(prefix_B.unsqueeze(-1) + padded.depth_BQ)[padded.exists_BQ]]
    length = len(tokens[0])
    for row, run in long:
        tokens.append(torch.tensor(run, dtype=torch.long, device=device))
        positions.append(prefix_B[row] + torch.arange(len(run), device=device))
        length += len(run)
        last_B[row] = length - 1
    return Packed(
        token_N=torch.cat(tokens),
        position_N=torch.cat(positions),
        index_BQ=index_BQ,
        last_B=last_B,
        new=NewTokens(
            table_BP=table_BP,
            prefix_B=prefix_B,
            start_B=start_B,
            count_B=count_B,
            offset=0,
            visible_BQW=padded.visible_BQQ,
            prompts=tuple((row, len(run)) for row, run in long),
        ),
    )
