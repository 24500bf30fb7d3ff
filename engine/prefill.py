"""Chunked prefill: prompts are read in pieces, so that a long one neither needs memory for all its activations at once nor holds up the
rows that decode beside it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.row import Row


def next_chunks(rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
    """The prompt tokens that each row reads in the next pass, `max_tokens` in all; the rows that came first take what they need first."""
    chunks: list[list[int]] = [[] for _ in rows]
    room = max_tokens
    for index in sorted(range(len(rows)), key=lambda index: rows[index].started):
        row = rows[index]
        if not row.is_prefilled:
            chunks[index] = row.tokens[row.num_cached : min(row.num_cached + room, row.num_prompt_tokens)]
            room -= len(chunks[index])
    return chunks
