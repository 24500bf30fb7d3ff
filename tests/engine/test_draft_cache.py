"""After any number of cycles the draft knows what it would know after a fresh prefill of the same text (FIELD-CASES B18)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from engine import Engine, Request, SamplingParams
from engine.row import Row
from tests.engine.tiny_engines import Tiny, random_prompts, read_cache
from tests.tiny_models import tiny_eagle3, tiny_llama

PROMPTS = random_prompts([6, 80, 3], seed=4)
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


def run_cycles(tiny: Tiny, num_cycles: int, method: str = "rheo") -> tuple[Engine, list[Row]]:
    """Rows in the middle of their texts, with several tokens accepted in some cycles."""
    engine = tiny.engine(method, tree_size=60, depth=3, top_k=10)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        engine.submit(Request(id=str(index), token_ids=prompt, params=params))
    for _ in range(1 + num_cycles):
        assert engine.step() == []
    rows = engine.running
    assert len(rows) == len(PROMPTS) and all(len(row.cycles) == num_cycles for row in rows)
    return engine, rows


def root_logits(engine: Engine, rows: list[Row]) -> Tensor:
    """The draft's logits [B, U] for the next root of each row."""
    with torch.inference_mode():
        return engine.decoder.drafter._model.begin(rows).logits_BU


def dense_logits(tiny: Tiny, tokens: list[int], shift: int = 0, path: Sequence[int] = ()) -> Tensor:
    """The same from transformers' hidden states (those entering layers 2, L//2 and L-3) and causal passes of the head.

    path: draft ids of a node behind the text; each has the feature that the head gave after the token before it.
    """
    num_layers = tiny.reference.config.num_hidden_layers
    with torch.inference_mode():
        hidden = tiny.reference(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([hidden[layer + shift][0] for layer in (2, num_layers // 2, num_layers - 3)], -1)

        def attend(query_NAD: Tensor, key_NGD: Tensor, value_NGD: Tensor) -> Tensor:
            parts = (part.transpose(0, 1) for part in (query_NAD, key_NGD, value_NGD))
            return torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(0, 1)

        tokens, feature_NH = tokens[1:], tiny.head.fuse(features)
        for draft_id in [*path, None]:
            g_NH = tiny.head(torch.tensor(tokens), feature_NH, torch.arange(len(tokens)), attend)
            if draft_id is not None:
                tokens, feature_NH = [*tokens, int(tiny.head.d2t[draft_id])], torch.cat([feature_NH, g_NH[-1:]])
        return tiny.head.logits(g_NH)[-1]


@pytest.mark.parametrize("method", ["rheo", "coupled", "chain"])
def test_draft_logits_equal_those_of_a_fresh_prefill(tiny, method):
    engine, rows = run_cycles(tiny, 6, method)
    if method != "chain":
        assert max(cycle.accepted for row in rows for cycle in row.cycles) >= 2
    logits = root_logits(engine, rows)
    for row, logits_V in zip(rows, logits, strict=True):
        fresh = tiny.engine(method)
        fresh.submit(Request(id="x", token_ids=row.tokens[:-1], params=SamplingParams(max_tokens=2, ignore_eos=True)))
        fresh.step()
        (fresh_row,) = fresh.running
        fresh_row.tokens[-1] = row.tokens[-1]
        torch.testing.assert_close(logits_V, root_logits(fresh, [fresh_row])[0], **CLOSE)


@pytest.mark.parametrize("num_cycles", [0, 5])
def test_draft_logits_equal_the_dense_reading(tiny, num_cycles):
    engine, rows = run_cycles(tiny, num_cycles)
    for row, logits_V in zip(rows, root_logits(engine, rows), strict=True):
        torch.testing.assert_close(logits_V, dense_logits(tiny, row.tokens), **CLOSE)
        off_by_one = (logits_V - dense_logits(tiny, row.tokens, shift=1)).abs().max()
        assert off_by_one > 0.1, "features one layer further must be told apart"


def test_each_node_of_a_tree_knows_its_path_and_nothing_else(narrow):
    """Parents that are neither in order nor all different, and a draft whose ids are not the target's."""
    engine, rows = run_cycles(narrow, 3)
    num_ids = len(narrow.head.d2t)
    generator = torch.Generator().manual_seed(0)
    paths: list[list[tuple[int, ...]]] = [[()] for _ in rows]
    with torch.inference_mode():
        start = engine.decoder.drafter._model.begin(rows)
        for width in (4, 3, 4):
            parent_BF = torch.stack([torch.randint(len(paths[0]), (width,), generator=generator) for _ in rows])
            id_BF = torch.stack([torch.randperm(num_ids, generator=generator)[:width] for _ in rows])
            logits_BFU = start.expand(id_BF, parent_BF)
            grown = zip(paths, parent_BF.tolist(), id_BF.tolist(), strict=True)
            paths = [[(*of_row[p], i) for p, i in zip(parents, ids, strict=True)] for of_row, parents, ids in grown]
            for row, of_row, logits_FU in zip(rows, paths, logits_BFU, strict=True):
                for path, logits_U in zip(of_row, logits_FU, strict=True):
                    torch.testing.assert_close(logits_U, dense_logits(narrow, row.tokens, path=path), **CLOSE)


def test_rows_keep_their_drafts_as_others_end(tiny):
    """The rows around them end in turn, and a later row takes the pages that were given back."""
    engine = tiny.engine("rheo", max_batch=3)
    for index, (prompt, max_tokens) in enumerate(zip([*PROMPTS, PROMPTS[0]], (40, 6, 40, 6), strict=True)):
        engine.submit(Request(id=str(index), token_ids=prompt, params=SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
    while engine.num_queued or engine.num_running > 2:
        engine.step()
    engine.step()
    rows = engine.running
    assert [row.request.id for row in rows] == ["0", "2"]
    for row, logits_V in zip(rows, root_logits(engine, rows), strict=True):
        torch.testing.assert_close(logits_V, dense_logits(tiny, row.tokens), **CLOSE)


def test_a_shallow_target_reads_one_layer_for_several_features(tmp_path):
    """Four layers: the features enter layers 2, 2 and 1, in this order."""
    target = tiny_llama(tmp_path / "target", vocab=24, layers=4)
    shallow = Tiny(target_folder=target, draft_folder=tiny_eagle3(tmp_path / "draft", LlamaConfig.from_pretrained(target)))
    engine, rows = run_cycles(shallow, 2)
    for row, logits_V in zip(rows, root_logits(engine, rows), strict=True):
        torch.testing.assert_close(logits_V, dense_logits(shallow, row.tokens), **CLOSE)


def test_target_cache_equals_a_fresh_prefill(tiny):
    """What later tokens attend to: the keys and values of the accepted path alone."""
    engine, rows = run_cycles(tiny, 6)
    for row in rows:
        fresh = tiny.engine("off")
        fresh.submit(Request(id="x", token_ids=row.tokens[:-1], params=SamplingParams(max_tokens=2, ignore_eos=True)))
        fresh.step()
        assert row.num_cached == len(row.tokens) - 1
        (same,) = fresh.running
        for kept, expected in zip(read_cache(engine, row), read_cache(fresh, same), strict=True):
            torch.testing.assert_close(kept, expected, **CLOSE)
