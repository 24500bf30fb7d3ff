"""The trees that a cycle asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.params import Speculation
from engine.row import Row

SIZES = (2, 4, 8, 16, 32, 60)
DEPTHS = (1, 2, 3, 5, 8)


class Setting(NamedTuple):
    """size: nodes of a tree, the root included. depth: draft levels."""

    size: int
    depth: int


PLAIN = Setting(1, 0)


@dataclass(frozen=True)
class Plan:
    """setting: of the largest tree. sizes: nodes of each row's tree at most, 1 for a row that takes a plain step."""

    setting: Setting
    sizes: list[int]


class Budget(Protocol):
    def plan(self, rows: Sequence[Row]) -> Plan:
        """The trees of the next cycle. Must read nothing that this cycle's draws decide (LAW.md section 6)."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """The same tree in every cycle, for every row that drafts."""

    setting: Setting

    def plan(self, rows: Sequence[Row]) -> Plan:
        return Plan(self.setting, [self.setting.size if row.drafts else 1 for row in rows])


def largest_setting(speculation: Speculation) -> Setting:
    """The configured tree. A node of level d needs d - 1 ancestors in the tree, so deeper levels could not be kept."""
    return Setting(speculation.tree_size, min(speculation.depth, speculation.tree_size - 1))


def grid(speculation: Speculation) -> list[Setting]:
    """Settings that `auto` chooses from, without `PLAIN`: up to the configured tree, and without those whose trees another one has too.

    Of `static`, prefixes of the topology in all its levels; of `chain`, its lengths.
    """
    largest = largest_setting(speculation)
    sizes = sorted({size for size in SIZES if size < largest.size} | {largest.size})
    depths = sorted({depth for depth in DEPTHS if depth < largest.depth} | {largest.depth})
    if speculation.method == "chain":
        return [Setting(depth + 1, depth) for depth in depths]
    if speculation.method == "static":
        return [Setting(size, min(largest.depth, size - 1)) for size in sizes]
    found = set()
    for depth in depths:
        num_candidates = speculation.top_k + (depth - 1) * speculation.top_k**2
        found |= {Setting(min(size, num_candidates + 1), min(depth, size - 1)) for size in sizes}
    return sorted(found)
