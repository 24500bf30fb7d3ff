"""Statistics of the engine's output against exact laws: the joint law of tokens 1 to 3, and of tokens 4 to 6, by chi-square.

Rows share their batches whatever their prompt and temperature. Exact laws come from transformers' own forward pass over every context.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import LlamaForCausalLM

from engine import Engine, Request, SamplingParams, Speculation, Verification
from engine.drafts.loading import load_draft
from engine.models.loading import load_causal_lm
from engine.models.source import ResolvedDraft
from engine.target import Target
from engine.topology import Topology
from jobs.statistics.toy_pair import VOCAB, Toy

PROMPTS = ([1, 4], [7, 2, 2, 0, 3, 6, 1, 1, 5])
TEMPERATURES = (1.0, 0.7)
NUM_TOKENS = 6
_LEAST_EXPECTED = 5.0

#: K, tree_size and depth: small enough that pruning drops many drawn tokens, which is where a wrong law shows
_TREE = {"top_k": 4, "tree_size": 8, "depth": 4}
_SHAPE = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))


@dataclasses.dataclass(frozen=True)
class Case:
    """A method with a kind of draft; `least_tau`: without so much acceptance the test would look at little."""

    speculation: Speculation
    draft: Literal["eagle3", "causal_lm", "ngram"] = "eagle3"
    least_tau: float = 2.0


CASES: dict[str, Case] = {
    "off": Case(Speculation(method="off", **_TREE), least_tau=1.0),
    "topk": Case(Speculation(method="topk", **_TREE)),
    "static": Case(Speculation(method="static", **{**_TREE, "tree_size": 1 + len(_SHAPE)})),
    "chain": Case(Speculation(method="chain", **_TREE)),
    "coupled": Case(Speculation(method="coupled", **_TREE)),
    **{f"rheo m={m}": Case(Speculation(method="rheo", m=m, **_TREE)) for m in (0, 1, 2, 3)},
    "rheo m=1 deterministic-first": Case(Speculation(method="rheo", m=1, verification=Verification(order="deterministic_first"), **_TREE)),
    **{f"language model, {method}": Case(Speculation(method=method, **_TREE), "causal_lm") for method in ("rheo", "static", "chain")},
    **{f"ngram, {method}": Case(Speculation(method=method, **_TREE), "ngram", 1.3) for method in ("rheo", "static", "chain")},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One chi-square test. p_value: chance of a statistic at least as large if the law is exact."""

    temperature: float
    tokens: str
    statistic: float
    degrees: int
    p_value: float
    total_variation: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Outcomes of one method over all its rows. tau: mean acceptance length, pooled over cycles."""

    outcomes: list[Outcome]
    tau: float
    num_rows: int
    seconds: float

    @property
    def least_p_value(self) -> float:
        return min(outcome.p_value for outcome in self.outcomes)


def load_toy_engine(toy: Toy, case: Case, *, max_batch: int = 4096) -> Engine:
    """An engine over the toy models on one CPU, in fp32, with many slots: its rows are tiny."""
    model = load_causal_lm(toy.target, torch.float32, torch.device("cpu"))
    folder = {"eagle3": toy.head, "causal_lm": toy.language_model, "ngram": None}[case.draft]
    draft = load_draft(ResolvedDraft(case.draft, folder, case.draft), model, attention="sdpa")()
    topology = Topology(path=Path("toy"), paths=_SHAPE) if case.speculation.method == "static" else None
    engine = Engine(Target(model, draft.feature_layers), draft, speculation=case.speculation, topology=topology, max_batch=max_batch)
    engine.decoder.max_prefill_tokens = max_batch * max(map(len, PROMPTS))  # every free slot is filled in one pass
    return engine


def exact_laws(target: Path) -> dict[tuple[int, float], tuple[Tensor, Tensor]]:
    """For each prompt's index and temperature, the joint laws of tokens 1-3 and 4-6, each [V ** 3], float64."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    contexts = torch.tensor(list(itertools.product(range(VOCAB), repeat=NUM_TOKENS - 1)))
    laws = {}
    for index, prompt in enumerate(PROMPTS):
        tokens = torch.cat([torch.tensor(prompt).expand(len(contexts), -1), contexts], 1)
        with torch.inference_mode():
            logits = torch.cat([model(part).logits[:, len(prompt) - 1 :] for part in tokens.split(4096)]).double()
        for temperature in TEMPERATURES:
            step = (logits / temperature).softmax(-1)  # [contexts, 6, V]
            last = contexts.unsqueeze(-1)
            path = torch.stack([step[:, place].gather(1, last[:, place]).squeeze(1) for place in range(NUM_TOKENS - 1)])
            first = path[:3].prod(0).view([VOCAB] * (NUM_TOKENS - 1))[:, :, :, 0, 0].flatten()
            joint = path.prod(0).unsqueeze(-1) * step[:, NUM_TOKENS - 1]
            second = joint.view(VOCAB**3, VOCAB**3).sum(0)
            laws[index, temperature] = (first, second)
    return laws


def run_case(engine: Engine, laws: dict[tuple[int, float], tuple[Tensor, Tensor]], num_rows: int, seed: int) -> CaseResult:
    """`num_rows` rows through the engine, then one test for each temperature and each half, prompts added up."""
    kinds = list(itertools.product(range(len(PROMPTS)), TEMPERATURES))
    counts = {kind: torch.zeros(2, VOCAB**3) for kind in kinds}
    weight = torch.tensor([VOCAB**2, VOCAB, 1])
    num_cycles = num_accepted = 0
    started = time.perf_counter()
    for results in _batched(engine.stream(_requests(kinds, num_rows, seed)), 4096):
        token_ids = torch.tensor([result.token_ids for result in results])
        cells = (token_ids.view(-1, 2, 3) * weight).sum(-1)
        row_kind = torch.tensor([int(result.id) % len(kinds) for result in results])
        for index, kind in enumerate(kinds):
            for half in range(2):
                counts[kind][half] += torch.bincount(cells[row_kind == index, half], minlength=VOCAB**3)
        num_cycles += sum(len(result.cycles) for result in results)
        num_accepted += sum(cycle.accepted for result in results for cycle in result.cycles)
    outcomes = [
        _test([(counts[index, temperature][half], laws[index, temperature][half]) for index in range(len(PROMPTS))], temperature, half)
        for temperature in TEMPERATURES
        for half in range(2)
    ]
    seconds = time.perf_counter() - started
    return CaseResult(outcomes=outcomes, tau=1 + num_accepted / num_cycles, num_rows=num_rows, seconds=seconds)


def _requests(kinds: Sequence[tuple[int, float]], num_rows: int, seed: int) -> Iterator[Request]:
    params = {
        temperature: SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed)
        for temperature in TEMPERATURES
    }
    for row in range(num_rows):
        index, temperature = kinds[row % len(kinds)]
        yield Request(id=str(row), token_ids=PROMPTS[index], params=params[temperature])


def _batched(items: Iterator, size: int) -> Iterator[list]:
    while batch := list(itertools.islice(items, size)):
        yield batch


def _test(samples: list[tuple[Tensor, Tensor]], temperature: float, half: int) -> Outcome:
    """Pearson's statistic over the prompts' cells; cells expected below 5 are pooled into one."""
    statistic, degrees, distance = 0.0, 0, 0.0
    for count, law in samples:
        expected = law * count.sum()
        small = expected < _LEAST_EXPECTED
        observed = torch.cat([count[~small], count[small].sum().unsqueeze(0)]).double()
        expected = torch.cat([expected[~small], expected[small].sum().unsqueeze(0)])
        used = expected > 0
        statistic += float(((observed - expected)[used] ** 2 / expected[used]).sum())
        degrees += int(used.sum()) - 1
        distance = max(distance, 0.5 * float((count.double() / count.sum() - law).abs().sum()))
    return Outcome(
        temperature=temperature,
        tokens=("1-3", "4-6")[half],
        statistic=statistic,
        degrees=degrees,
        p_value=float(chi2.sf(statistic, degrees)),
        total_variation=distance,
    )
