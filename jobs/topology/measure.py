"""The topology of static trees that suits a target and its draft, from how often the child of each rank is accepted.

    python -m jobs.topology.measure ../shared/data/train/mix_15k.jsonl.gz --output engine/models/smollm2-eagle3/topology.json

The prompts are answered with broad static trees. The file holds the counts, the rates, and the most valuable nodes under them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import Engine, Request, SamplingParams, Speculation
from engine.law.draws import Draws
from engine.law.tree import Tree
from engine.law.verification import Rule, Visit
from jobs.topology.build import acceptance_rates, build_topology

NUM_RANKS = 10
MAX_DEPTH = 10
LONGEST_PROMPT = 400  # characters

#: nodes and levels of the broad trees, and the rates that they are best for: flatter than a draft's own, so that every rank is tried
_BROAD_NODES, _BROAD_DEPTH = 120, 6
_BROAD_RATES = [0.5 * 0.8**rank for rank in range(NUM_RANKS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSONL, also as .gz: of records with a `prompt` the short ones are used")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, default=256)
    args = parser.parse_args()
    prompts = read_prompts(args.file, args.prompts)
    counter = measure(prompts, args)
    rates = acceptance_rates(counter.accepted, counter.visits)
    write_topology(
        args.output,
        {
            "measured_on": {
                "target": args.target,
                "draft": args.draft,
                "prompts": f"{len(prompts)} of {args.file.name}",
                "max_tokens": args.max_tokens,
                "temperature": args.temperature,
            },
            "accepted": counter.accepted,
            "visits": counter.visits,
            "acceptance": rates,
            "paths": build_topology(rates, args.nodes, MAX_DEPTH),
        },
    )
    print(f"{args.output}: {counter.visits[0]} nodes visited, acceptance by rank {' '.join(f'{rate:.3f}' for rate in rates)}")


def read_prompts(file: Path, num_prompts: int) -> list[str]:
    """Short prompts from all over the file."""
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    short = [record["prompt"] for record in records if len(record.get("prompt") or "") in range(1, LONGEST_PROMPT + 1)]
    return short[:: max(1, len(short) // num_prompts)][:num_prompts]


class RankCounter:
    """A verification rule that also counts, over the nodes that it visits.

    visits[k]: nodes with a child of rank k. accepted[k]: of these, where that child was accepted.
    """

    def __init__(self, rule: Rule, num_ranks: int):
        self._rule = rule
        self.visits, self.accepted = [0] * num_ranks, [0] * num_ranks

    def __call__(self, tree: Tree, visit: Visit, draws: Draws) -> Tensor:
        token_B = self._rule(tree, visit, draws)
        _count(self.visits, tree.slot_BR[visit.child_BR])
        _count(self.accepted, tree.slot_BR[visit.child_BR & (tree.token_BR == token_B.unsqueeze(-1))])
        return token_B


def _count(counts: list[int], ranks: Tensor) -> None:
    for rank in ranks.tolist():
        counts[rank] += 1


def measure(prompts: Iterable[str], args: argparse.Namespace) -> RankCounter:
    with tempfile.TemporaryDirectory() as folder:
        broad = Path(folder) / "broad.json"
        write_topology(broad, {"paths": build_topology(_BROAD_RATES, _BROAD_NODES, _BROAD_DEPTH)})
        speculation = Speculation(method="static", tree_size=_BROAD_NODES + 1, depth=_BROAD_DEPTH, topology=str(broad))
        engine = Engine.load(args.target, args.draft, speculation=speculation)
    engine.decoder.rule = counter = RankCounter(engine.decoder.rule, NUM_RANKS)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
    requests = [Request(messages=[{"role": "user", "content": prompt}], params=params) for prompt in prompts]
    for result in engine.stream(requests):
        if result.error is not None:
            raise result.error
    return counter


def write_topology(path: Path, content: Mapping[str, Any]) -> None:
    """JSON with one line for each key: the paths fill one."""
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
