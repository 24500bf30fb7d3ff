"""Static against dynamic trees, at the same number of drafted tokens: the dilemma that the first paper starts from.

    python -m jobs.acceptance.trees ../shared/data/specbench --per-set 40 --seeds 2

At T > 0 a dynamic tree of deterministic nodes (`topk`) fits each context but accepts as one-hot proposals do; a static tree draws its
tokens, but has one shape for all contexts. One cycle from each context under several seeds, as in jobs.acceptance.paired; the table goes to
jobs/results/trees.json.
"""

from __future__ import annotations

from engine import Speculation
from jobs.acceptance.intervals import gain, tau_table
from jobs.acceptance.paired import acceptance, prepare
from jobs.evidence import write_result

_NUM_DRAFTED = (8, 16, 32, 59)
_METHODS = ("static", "topk", "rheo", "coupled")
_CHAIN = 8


def main() -> None:
    args, questions, contexts = prepare(__doc__, num_seeds=2)
    arms = {(method, num): Speculation(method=method, tree_size=num + 1, depth=8, top_k=10) for num in _NUM_DRAFTED for method in _METHODS}
    arms["chain", _CHAIN] = Speculation(method="chain", tree_size=_CHAIN + 1, depth=_CHAIN)
    sums = {}
    for (method, num), speculation in arms.items():
        sums[method, num] = acceptance(questions, contexts, speculation, range(args.seeds), args.max_batch)
        print(method, num, tau_table(sums[method, num]), flush=True)
    write_result(
        "trees",
        {
            "contexts": len(contexts),
            "seeds": list(range(args.seeds)),
            "temperature": 1.0,
            "tau": {f"{method} {num}": tau_table(of_sets) for (method, num), of_sets in sums.items()},
            "over_static": {
                f"{method} {num}": gain(of_sets, sums["static", num]) for (method, num), of_sets in sums.items() if method != "static"
            },
        },
    )


if __name__ == "__main__":
    main()
