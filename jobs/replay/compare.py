"""The same seed, the same text: `coupled` and `topk` against `off`, token by token, on the real pair at T = 1.

    python -m jobs.replay.compare ../shared/data/specbench --per-set 8 --tokens 64

In fp32 a first difference is only right where the two best of log p + noise nearly tie; the gap is written down for each. In bf16 the
rate of rows that differ is measured. The table is written to jobs/results/replay.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from engine import Engine, Request, Result, SamplingParams, Speculation
from engine.law.draws import KeyedDraws
from engine.law.keys import row_key
from engine.models.loading import load_causal_lm
from engine.models.source import resolve_target
from jobs.acceptance.questions import Question, read_questions
from jobs.evidence import write_result

_TARGET = "smollm2-135m-instruct"
_TREE = {"tree_size": 60, "depth": 8, "top_k": 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with alpaca.jsonl, gsm8k.jsonl, ...")
    parser.add_argument("--per-set", type=int, default=8, choices=[n for n in range(1, 81) if 80 % n == 0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-batch", type=int, default=16)
    args = parser.parse_args()
    questions = read_questions(args.folder, every=80 // args.per_set)
    figures: dict = {"prompts": len(questions), "tokens": args.tokens}
    for dtype in ("float32", "bfloat16"):
        plain = _generate(questions, "off", dtype, args)
        for method in ("coupled", "topk"):
            results = _generate(questions, method, dtype, args)
            different = [(a, b) for a, b in zip(plain, results, strict=True) if a.token_ids != b.token_ids]
            accepted = sum(cycle.accepted for result in results for cycle in result.cycles)
            cycles = sum(len(result.cycles) for result in results)
            figures[f"{method} {dtype}"] = {
                "rows": len(results),
                "rows_that_differ": len(different),
                "tau": round(1 + accepted / cycles, 3),
                "gaps_at_first_difference": [_gap(a, b) for a, b in different] if dtype == "float32" else None,
            }
            print(method, dtype, figures[f"{method} {dtype}"], flush=True)
    write_result("replay", figures)


def _generate(questions: Sequence[Question], method: str, dtype: str, args: argparse.Namespace) -> list[Result]:
    engine = Engine.load(_TARGET, dtype=dtype, speculation=Speculation(method=method, **_TREE), max_batch=args.max_batch)
    params = SamplingParams(max_tokens=args.tokens)
    return engine.generate([Request(id=q.id, messages=[{"role": "user", "content": q.prompt}], params=params) for q in questions])


@torch.inference_mode()
def _gap(plain: Result, other: Result) -> float:
    """How far the two best of log p + noise lie apart where two texts part."""
    position = next(i for i, (a, b) in enumerate(zip(plain.token_ids, other.token_ids, strict=False)) if a != b)
    engine = Engine.load(_TARGET, dtype="float32", speculation=Speculation(method="off"))
    prompt = engine.tokenizer(plain.prompt, add_special_tokens=False)["input_ids"]
    model = load_causal_lm(resolve_target(_TARGET).path, torch.float32, torch.device("cpu"))
    model.config._attn_implementation = "eager"
    log_p = model(torch.tensor([prompt + plain.token_ids[:position]])).logits[0, -1].log_softmax(-1)
    draws = KeyedDraws(torch.tensor([row_key(plain.seed, plain.id, plain.sample)]))
    best = (log_p + draws.noise(torch.tensor([position]), len(log_p))[0]).topk(2).values
    return float(best[0] - best[1])


if __name__ == "__main__":
    main()
