"""From measured acceptance to the best static trees, under Sequoia's positional model (arXiv 2402.12374): the child of rank k is the
accepted one with chance a[k], whatever its parent, so a node is reached with the product over its path, and a tree accepts the sum."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise


def acceptance_rates(accepted: Sequence[int], visits: Sequence[int]) -> list[float]:
    """a[k]: accepted / visits of the children of rank k, and never more than the rank before. That a later rank does better is noise, and
    would ask for shapes with holes."""
    rates = (hits / tries if tries else 0.0 for hits, tries in zip(accepted, visits, strict=True))
    return list(accumulate(rates, min))


def build_topology(acceptance: Sequence[float], num_nodes: int, max_depth: int) -> list[list[int]]:
    """The most valuable nodes, best first, as paths of child ranks; ties: the shorter path, then the lower ranks.

    acceptance: not increasing, so that parents and lower siblings are worth no less than a node, and the first n nodes are the best tree
    of n, within any depth.
    """
    assert all(a >= b for a, b in pairwise(acceptance)), "a rank is worth no more than the one before"
    paths = []
    heap = [(-acceptance[0], 1, [0], 1.0)]  # -value, length, path, value of the parent
    while heap and len(paths) < num_nodes:
        negative_value, length, path, parent_value = heapq.heappop(heap)
        paths.append(path)
        if length < max_depth:
            heapq.heappush(heap, (negative_value * acceptance[0], length + 1, [*path, 0], -negative_value))
        next_rank = path[-1] + 1
        if next_rank < len(acceptance):
            heapq.heappush(heap, (-parent_value * acceptance[next_rank], length, [*path[:-1], next_rank], parent_value))
    return paths
