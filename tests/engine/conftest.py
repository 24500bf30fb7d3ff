"""Tiny models, built once a session."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from tests.engine.tiny_engines import LAYERS, VOCAB, Clock, Tiny, random_prompts
from tests.tiny_models import tiny_eagle3, tiny_llama


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thousands of small operations: with several threads on a busy machine they are up to forty times as slow."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    """A random target with a random draft over the same vocabulary."""
    folder = tmp_path_factory.mktemp("tiny")
    target = tiny_llama(folder / "target", vocab=VOCAB, layers=LAYERS)
    return Tiny(target_folder=target, draft_folder=tiny_eagle3(folder / "draft", LlamaConfig.from_pretrained(target)))


@pytest.fixture(scope="session")
def narrow(tmp_path_factory, tiny) -> Tiny:
    """The same target with a draft that knows 9 of its 24 tokens."""
    folder = tmp_path_factory.mktemp("narrow")
    draft = tiny_eagle3(folder / "draft", tiny.target.config, draft_vocab=9, seed=3)
    return Tiny(target_folder=tiny.target_folder, draft_folder=draft)


@pytest.fixture(scope="session")
def ragged_prompts() -> list[list[int]]:
    """More rows than the slots that tests give, with runs on both sides of packing.LONG_RUN."""
    return random_prompts([5, 70, 1, 64, 65, 13, 2])


@pytest.fixture(scope="session")
def make_clock(tmp_path_factory):
    """make_clock(text) is a clock that, after token 0, says `text`: distinct token ids, the last of which repeats for ever."""
    made: dict[tuple[int, ...], Clock] = {}

    def make(text: list[int]) -> Clock:
        assert len(set(text)) == len(text) and 0 not in text, "a token has one successor"
        key = tuple(text)
        if key not in made:
            made[key] = Clock(tmp_path_factory.mktemp("clock"), dict(zip([0, *text], text, strict=False)))
        return made[key]

    return make
