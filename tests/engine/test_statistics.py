"""Chi-square of the engine's output on a real toy pair against exact laws (LAW.md 5.5), with mutants that must fail."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine import Speculation, drafting
from engine.law import candidates, growth
from engine.native import sampling
from jobs.statistics.chi_square import CASES, Case, exact_laws, load_toy_engine, run_case
from jobs.statistics.toy_pair import build_toy
from tests.kernels import needs_kernels

_NUM_ROWS = {"eagle3": 20_000, "causal_lm": 5_000, "ngram": 5_000}  # the law is one code; the other drafts only give it other laws
_SEED = 0
#: 4 tests a case; Bonferroni over all of them at a level of 1%
_LEVEL = 0.01 / (4 * len(CASES))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    models = build_toy(tmp_path_factory.mktemp("toy"))
    return models, exact_laws(models.target)


@pytest.mark.parametrize("name", CASES)
def test_the_engines_law_is_the_targets(toy, name):
    models, laws = toy
    result = run_case(load_toy_engine(models, CASES[name]), laws, _NUM_ROWS[CASES[name].draft], _SEED)
    assert result.least_p_value > _LEVEL, result
    assert result.tau >= CASES[name].least_tau


@needs_kernels
@pytest.mark.parametrize("name", ("off", "topk", "coupled", "rheo m=1"))
def test_so_it_is_by_the_kernels(toy, name):
    """Their softmax and draws, which bf16 gets on a CPU; the models stay in fp32, in which the law is known."""
    models, laws = toy
    engine = load_toy_engine(models, CASES[name])
    engine.decoder.make_draws, engine.decoder.softmax = sampling.NativeDraws, sampling.softmax_at
    result = run_case(engine, laws, _NUM_ROWS["eagle3"], _SEED)
    assert result.least_p_value > _LEVEL, result
    assert result.tau >= CASES[name].least_tau


def _proxy_below_the_floor(monkeypatch):
    monkeypatch.setattr(candidates, "proxy", lambda q_BFM, m: 0.5 * q_BFM[..., m])
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)


def _shared_draws(monkeypatch):
    monkeypatch.setattr(growth, "fold", lambda path, slot: path)


def _wrong_q(monkeypatch):
    prune = drafting.prune

    def prune_and_flatten_q(*args):
        tree = prune(*args)
        flatter = tree.proposal.probability.sqrt()
        proposal = dataclasses.replace(tree.proposal, probability=flatter / flatter.sum(-1, keepdim=True))
        return dataclasses.replace(tree, proposal=proposal)

    monkeypatch.setattr(drafting, "prune", prune_and_flatten_q)


#: each with a tree in which it does harm: pruning must touch the tokens that it moves
MUTANTS = {
    "proxy below the floor": (_proxy_below_the_floor, Speculation(method="rheo", m=1, top_k=4, tree_size=4, depth=4)),
    "shared draws": (_shared_draws, Speculation(method="rheo", m=0, top_k=4, tree_size=8, depth=4)),
    "wrong q": (_wrong_q, Speculation(method="rheo", m=1, top_k=4, tree_size=8, depth=4)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(toy, monkeypatch, name):
    models, laws = toy
    mutate, speculation = MUTANTS[name]
    mutate(monkeypatch)
    result = run_case(load_toy_engine(models, Case(speculation)), laws, _NUM_ROWS["eagle3"], _SEED)
    assert result.least_p_value < _LEVEL
