"""Shards and batches: what was captured is what a step reads, every place once an epoch, the same after a restart."""

from __future__ import annotations

import itertools
from dataclasses import fields

import numpy as np
import pytest
import torch

from jobs.train_draft.batches import Batches
from jobs.train_draft.shards import CapturedText, Corpus, write_shard

QUERIES, STEPS = 4, 3


def make_text(number: int) -> CapturedText:
    """Its numbers say where they come from: 100 * text + position."""
    length, answer = 6 + number % 7, 3 + number % 4
    position = 100.0 * number + torch.arange(length)
    return CapturedText(
        token_n=position.long(),
        feature_nF=position.unsqueeze(-1).repeat(1, 3),
        hidden_mH=position[-answer:].unsqueeze(-1).repeat(1, 2),
        log_z_m=position[-answer:],
        prompt_hash=number,
    )


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    for shard in range(4):
        write_shard(tmp_path / f"part-{shard}.safetensors", [make_text(5 * shard + number) for number in range(5)])
    return Corpus(tmp_path)


def make_batches(corpus: Corpus, batch: int = 3) -> Batches:
    return Batches(corpus, np.arange(len(corpus)), batch=batch, queries=QUERIES, steps=STEPS, seed=7)


def test_a_corpus_holds_the_texts_as_they_were_written(corpus):
    assert len(corpus) == 20
    for number in range(20):
        text = make_text(number)
        assert torch.equal(corpus.token(number), text.token_n)
        assert torch.equal(corpus.feature(number, 4), text.feature_nF[:4])
        start = text.answer_start
        hidden, log_z = corpus.law(number, start + 1, start + 3)
        assert torch.equal(hidden, text.hidden_mH[1:3])
        assert torch.equal(log_z, text.log_z_m[1:3])


def test_a_batch_compares_each_place_with_its_own_law(corpus):
    batches = make_batches(corpus)
    for windows in batches.epoch(0):
        batch = batches.read(windows)
        for row, (text, first) in enumerate(windows):
            there = batch.exists_BT[row]
            position = first + 1 + torch.arange(QUERIES + STEPS - 1)[there]
            assert there.any()
            assert torch.equal(batch.token_BT[row][there], 100 * text + position)
            assert torch.equal(batch.log_z_BT[row][there], 100.0 * text + position)
            assert position.max() <= corpus.length_D[text] - 2  # after the last token nothing is drafted
            assert position.min() >= corpus.answer_start_D[text]
        pairs = batch.context_BL.sum(-1).tolist()
        for (text, first), tokens, features in zip(windows, batch.token_N.split(pairs), batch.feature_NF.split(pairs), strict=True):
            assert first < len(tokens) <= first + QUERIES
            assert torch.equal(tokens, 100 * text + 1 + torch.arange(len(tokens)))
            assert torch.equal(features[:, 0], 100.0 * text + torch.arange(len(tokens)))


def test_an_epoch_begins_at_every_place_once(corpus):
    windows = [window for batch in make_batches(corpus, batch=1).epoch(3) for window in batch]
    starts = [(text, place) for text, first in windows for place in range(first, first + QUERIES) if place <= corpus.length_D[text] - 3]
    expected = [(text, place) for text in range(20) for place in range(corpus.answer_start_D[text] - 1, corpus.length_D[text] - 2)]
    assert sorted(starts) == expected


def test_a_restart_goes_on_with_the_same_batches(corpus):
    whole = list(itertools.islice(make_batches(corpus).from_step(0, 0, 1), 30))
    rest = list(itertools.islice(make_batches(corpus).from_step(11, 0, 1), 19))
    for one, other in zip(whole[11:], rest, strict=True):
        assert all(torch.equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))


def test_workers_share_the_batches_out(corpus):
    whole = list(itertools.islice(make_batches(corpus).from_step(0, 0, 1), 20))
    shares = [list(itertools.islice(make_batches(corpus).from_step(0, rank, 2), 10)) for rank in range(2)]
    for number, batch in enumerate(whole):
        assert torch.equal(batch.first_B, shares[number % 2][number // 2].first_B)
        assert torch.equal(batch.token_N, shares[number % 2][number // 2].token_N)
