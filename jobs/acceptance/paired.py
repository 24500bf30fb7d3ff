"""tau of one cycle from the same contexts, method by method: pairs need far fewer prompts than runs whose texts differ.

    python -m jobs.acceptance.paired ../shared/data/specbench --per-set 40 --seeds 4

A context is a question with the beginning of an answer that the target wrote by itself (`off`). Each method drafts and verifies
one cycle from it under several seeds. The table is written to jobs/results/paired.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from engine import Engine, Request, SamplingParams, Speculation
from engine.law.keys import row_key
from jobs.acceptance.intervals import gain, tau_table
from jobs.acceptance.questions import Question, read_questions
from jobs.evidence import write_result

_TARGET = "smollm2-135m-instruct"
_TREE = {"tree_size": 60, "depth": 8, "top_k": 10}
METHODS = {
    "topk": Speculation(method="topk", **_TREE),
    **{f"rheo m={m}": Speculation(method="rheo", m=m, **_TREE) for m in (0, 1, 2)},
    "coupled": Speculation(method="coupled", **_TREE),
}
_LONGEST_ANSWER = 48
_WRITING_SEED = 1_000_000  # none of the measured ones: their noise must know nothing of how a context came about
_MORE_THAN_A_CYCLE = 64


def main() -> None:
    args, questions, contexts = prepare(__doc__, num_seeds=4)
    sums = {}
    for method, speculation in METHODS.items():
        sums[method] = acceptance(questions, contexts, speculation, range(args.seeds), args.max_batch)
        print(method, tau_table(sums[method]), flush=True)
    write_result(
        "paired",
        {
            "contexts": len(contexts),
            "seeds": list(range(args.seeds)),
            "tau": {method: tau_table(of_sets) for method, of_sets in sums.items()},
            "over_topk": {method: gain(of_sets, sums["topk"]) for method, of_sets in sums.items() if method != "topk"},
            "coupled_over_rheo": gain(sums["coupled"], sums["rheo m=1"]),
        },
    )


def prepare(description: str, *, num_seeds: int) -> tuple[argparse.Namespace, list[Question], list[list[int]]]:
    """The command line, the questions that it asks for, and a context of each. num_seeds: unless --seeds says otherwise."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with alpaca.jsonl, gsm8k.jsonl, ...")
    parser.add_argument("--per-set", type=int, default=40, choices=[n for n in range(1, 81) if 80 % n == 0])
    parser.add_argument("--seeds", type=int, default=num_seeds)
    parser.add_argument("--max-batch", type=int, default=16)
    args = parser.parse_args()
    questions = read_questions(args.folder, every=80 // args.per_set)
    return args, questions, write_contexts(questions, args.max_batch)


def write_contexts(questions: Sequence[Question], max_batch: int) -> list[list[int]]:
    """A question's tokens and 1 to 48 tokens of the target's own answer; its last only where it is the only one."""
    engine = Engine.load(_TARGET, speculation=Speculation(method="off"), max_batch=max_batch, seed=_WRITING_SEED)
    lengths = np.random.default_rng(0).integers(1, _LONGEST_ANSWER + 1, len(questions))
    params = SamplingParams(max_tokens=_LONGEST_ANSWER + 1)
    requests = [Request(id=q.id, messages=[{"role": "user", "content": q.prompt}], params=params) for q in questions]
    contexts = []
    for result, length in zip(engine.generate(requests), lengths, strict=True):
        prompt = engine.tokenizer(result.prompt, add_special_tokens=False)["input_ids"]
        answer = result.token_ids[: min(int(length), len(result.token_ids) - 1)]
        contexts.append([*prompt, *(answer or result.token_ids)])
    return contexts


def acceptance(
    questions: Sequence[Question], contexts: Sequence[list[int]], speculation: Speculation, seeds: Sequence[int], max_batch: int
) -> dict[str, np.ndarray]:
    """[contexts, 2] for each set: accepted tokens and cycles, summed over seeds."""
    engine = Engine.load(_TARGET, speculation=speculation, max_batch=max_batch)
    engine.decoder.max_prefill_tokens = max_batch * engine.max_model_len  # every prompt in one pass, so that rows draft together
    sums: dict[str, list] = {}
    for start in range(0, len(contexts), max_batch):
        part = slice(start, start + max_batch)
        accepted = _one_cycle(engine, [q.id for q in questions[part]], contexts[part], seeds)
        for question, of_seeds in zip(questions[part], accepted, strict=True):
            sums.setdefault(question.set, []).append([sum(of_seeds), len(of_seeds)])
    return {name: np.array(of_set) for name, of_set in sums.items()}


def _one_cycle(engine: Engine, ids: Sequence[str], contexts: Sequence[list[int]], seeds: Sequence[int]) -> list[list[int]]:
    """Accepted tokens of one cycle from each context, for each seed; the prefill is done once, and its state put back before each seed."""
    params = SamplingParams(max_tokens=_MORE_THAN_A_CYCLE, ignore_eos=True)
    for id, context in zip(ids, contexts, strict=True):
        engine.submit(Request(id=id, token_ids=context[:-1], params=params))
    engine.step()
    rows = sorted(engine.running, key=lambda row: ids.index(row.request.id))
    for row, context in zip(rows, contexts, strict=True):
        row.tokens[-1] = context[-1]  # in place of the token that the prefill drew
    saved = [(len(row.tokens), row.num_cached, row.num_draft_cached, row.pending_TF) for row in rows]
    accepted: list[list[int]] = [[] for _ in rows]
    for seed in seeds:
        for row, (length, row.num_cached, row.num_draft_cached, row.pending_TF) in zip(rows, saved, strict=True):
            del row.tokens[length:]
            row.num_cycles = 0
            row.key = row_key(seed, row.request.id, 0)
        engine.step()
        for of_row, row in zip(accepted, rows, strict=True):
            of_row.append(row.cycles[-1].accepted)
    engine.running.clear()
    return accepted


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
