"""Topology files: the shapes of static trees (DESIGN.md section 4). Imports no torch.

A file is a JSON object. Its `paths` are nodes, each as the ranks of the children that lead to it from the root: [0, 2] is the third child
of the first child. They stand in the order of their value, so that the first n within a depth make the best tree of n drafted tokens.
What else the file holds says how it came about (jobs/topology).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError

Node = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """paths: nodes in the order of their value; parents and lower siblings come before a node. path: the file."""

    path: Path
    paths: tuple[Node, ...]

    def first(self, num_nodes: int, depth: int) -> tuple[Node, ...]:
        """The best tree of `num_nodes` drafted tokens in `depth` levels. Raises UserError where the file has too few."""
        within = [node for node in self.paths if len(node) <= depth]
        if len(within) < num_nodes:
            raise UserError(
                f"speculation.tree_size={num_nodes + 1} and depth={depth} ask for {num_nodes} drafted nodes; "
                f"speculation.topology='{self.path}' has {len(within)} within that depth"
            )
        return tuple(within[:num_nodes])


def read_topology(path: str | Path) -> Topology:
    """Raises UserError with the file, what is wrong in it, and what is allowed."""
    path = Path(path).expanduser()

    def refuse(reason: str) -> UserError:
        return UserError(f"speculation.topology='{path}' {reason}")

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise refuse(f"is not JSON: {error}") from None
    paths = content.get("paths") if isinstance(content, dict) else None
    if not isinstance(paths, list) or not paths:
        raise refuse("has no `paths`; allowed: a JSON object with a list of child-rank paths, such as [[0], [1], [0, 0]]")
    nodes: dict[Node, None] = {}
    for number, ranks in enumerate(paths):
        if not isinstance(ranks, list) or not ranks or not all(type(rank) is int and rank >= 0 for rank in ranks):
            raise refuse(f"has paths[{number}]={ranks!r}; allowed: a list of child ranks, integers >= 0")
        node = tuple(ranks)
        if node in nodes:
            raise refuse(f"has paths[{number}]={ranks} twice")
        before = [node[:-1]] if len(node) > 1 else []
        before += [(*node[:-1], node[-1] - 1)] if node[-1] else []
        for needed in before:
            if needed not in nodes:
                raise refuse(f"has paths[{number}]={ranks} without {list(needed)} before it; parents and lower siblings come first")
        nodes[node] = None
    return Topology(path=path, paths=tuple(nodes))
