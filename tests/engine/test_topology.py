"""Topologies of static trees: the file, the shipped one, and the tool that computes them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from engine.errors import UserError
from engine.law.tree import Tree, root_only
from engine.law.verification import Visit
from engine.models.presets import PRESETS
from engine.topology import read_topology
from jobs.topology.build import acceptance_rates, build_topology
from jobs.topology.measure import MAX_DEPTH, RankCounter, read_prompts, write_topology

SHIPPED = PRESETS["smollm2-135m-instruct"].topology
PATHS = [[0], [1], [0, 0], [2], [0, 1], [0, 0, 0]]


def write(folder: Path, content: object) -> Path:
    path = folder / "tree.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "num_nodes, depth, expected",
    [
        (1, 1, [[0]]),
        (3, 3, [[0], [1], [0, 0]]),
        (3, 1, [[0], [1], [2]]),
        (5, 2, [[0], [1], [0, 0], [2], [0, 1]]),
        (6, 9, PATHS),
    ],
)
def test_first_nodes_within_a_depth(tmp_path, num_nodes, depth, expected):
    topology = read_topology(write(tmp_path, {"paths": PATHS, "measured_on": "whatever"}))
    assert topology.first(num_nodes, depth) == tuple(map(tuple, expected))


def test_too_few_nodes(tmp_path):
    path = write(tmp_path, {"paths": PATHS})
    with pytest.raises(UserError) as caught:
        read_topology(path).first(6, 2)
    assert all(part in str(caught.value) for part in ("tree_size=7", "depth=2", "6 drafted nodes", "has 5", str(path)))


@pytest.mark.parametrize(
    "content, reason",
    [
        ("{", "is not JSON"),
        (b"\xff\xfe".decode("latin-1"), "is not JSON"),
        ([[0]], "has no `paths`"),
        ({}, "has no `paths`"),
        ({"paths": []}, "has no `paths`"),
        ({"paths": [0]}, "paths[0]=0; allowed"),
        ({"paths": [[]]}, "paths[0]=[]; allowed"),
        ({"paths": [[0], [-1]]}, "paths[1]=[-1]; allowed"),
        ({"paths": [[0], [True]]}, "paths[1]=[True]; allowed"),
        ({"paths": [[0], [1.0]]}, "paths[1]=[1.0]; allowed"),
        ({"paths": [[0], [0]]}, "paths[1]=[0] twice"),
        ({"paths": [[0, 0], [0]]}, "paths[0]=[0, 0] without [0] before it"),
        ({"paths": [[0], [2], [1]]}, "paths[1]=[2] without [1] before it"),
        ({"paths": [[0], [0, 1]]}, "paths[1]=[0, 1] without [0, 0] before it"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, content, reason):
    path = write(tmp_path, content)
    with pytest.raises(UserError) as caught:
        read_topology(path)
    assert str(caught.value).startswith(f"speculation.topology='{path}' ") and reason in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(UserError, match="cannot be read"):
            read_topology(path)


def test_shipped_topology_is_what_the_tool_computes():
    content = json.loads(SHIPPED.read_text(encoding="utf-8"))
    assert content["acceptance"] == acceptance_rates(content["accepted"], content["visits"])
    assert content["paths"] == build_topology(content["acceptance"], len(content["paths"]), MAX_DEPTH)


@pytest.mark.parametrize("num_nodes, depth", [(7, 3), (8, 8), (16, 8), (32, 8), (59, 8), (59, 4), (127, 10)])
def test_shipped_topology_has_enough_nodes(num_nodes, depth):
    nodes = read_topology(SHIPPED).first(num_nodes, depth)
    assert len(nodes) == num_nodes and max(map(len, nodes)) <= depth


# --- the tool --------------------------------------------------------------------------------------------------------------------------


def value(paths: list[list[int]], acceptance: list[float]) -> float:
    return sum(math.prod(acceptance[rank] for rank in path) for path in paths)


def best_value(num_nodes: int, depth: int, acceptance: list[float]) -> float:
    """Over all trees, by choosing how many nodes each child's subtree has."""
    if num_nodes == 0 or depth == 0:
        return 0.0
    best = 0.0
    for split in itertools.product(range(num_nodes + 1), repeat=len(acceptance)):
        if sum(split) == num_nodes:
            children = zip(split, acceptance, strict=True)
            best = max(best, sum(a * (1 + best_value(size - 1, depth - 1, acceptance)) for size, a in children if size))
    return best


@pytest.mark.parametrize("acceptance", ([0.6, 0.3, 0.1], [0.9, 0.05, 0.05], [0.4, 0.4, 0.4], [0.3, 0.2, 0.0], [1.0, 0.5]))
@pytest.mark.parametrize("depth", (1, 2, 4))
def test_first_nodes_are_the_best_tree(acceptance, depth):
    nodes = [path for path in build_topology(acceptance, 200, 4) if len(path) <= depth]
    for num_nodes in range(1, 6):
        if num_nodes <= len(nodes):
            assert value(nodes[:num_nodes], acceptance) == pytest.approx(best_value(num_nodes, depth, acceptance))


def test_what_is_built_can_be_read(tmp_path):
    """Ties too: parents and lower siblings first."""
    for acceptance in ([0.5, 0.5, 0.5], [1.0, 1.0], [0.2, 0.1, 0.0]):
        paths = build_topology(acceptance, 100, 4)
        assert len(paths) == min(100, sum(len(acceptance) ** depth for depth in range(1, 5)))
        write_topology(tmp_path / "built.json", {"paths": paths})
        assert read_topology(tmp_path / "built.json").paths == tuple(map(tuple, paths))


def test_rates_never_rise_with_the_rank():
    assert acceptance_rates([50, 10, 12, 3, 0, 0], [100, 90, 80, 60, 10, 0]) == [0.5, 10 / 90, 10 / 90, 0.05, 0.0, 0.0]


def test_counter_takes_down_ranks():
    """Three rows at their roots: of two, one and no children. The rule's token is the second child, none, and nothing that was drafted."""
    bare = root_only(3, torch.device("cpu"))

    def column(root: int, *rows: list[int]) -> torch.Tensor:
        return torch.tensor([[root, *row] for row in rows])

    tree = Tree(
        token_BR=column(-1, [7, 8], [7, -1], [-1, -1]),
        slot_BR=column(-1, [0, 1], [0, -1], [-1, -1]),
        exists_BR=column(1, [1, 1], [1, 0], [0, 0]).bool(),
        depth_BR=column(0, [1, 1], [1, 0], [0, 0]),
        parent_BR=column(0, [0, 0], [0, 0], [0, 0]),
        sampled_BR=column(0, [1, 1], [1, 0], [0, 0]).bool(),
        origin_BR=column(0, [0, 0], [0, 0], [0, 0]),
        proposal=None,
        max_depth=1,
    )
    visit = Visit(p_BV=torch.ones(3, 9), child_BR=tree.depth_BR == 1, position_B=torch.zeros(3).long(), active_B=bare.exists_BR.squeeze(1))
    counter = RankCounter(lambda *_: torch.tensor([8, 6, 7]), num_ranks=3)
    assert counter(tree, visit, None).tolist() == [8, 6, 7]
    assert counter.visits == [2, 1, 0] and counter.accepted == [0, 1, 0]


def test_prompts_come_from_all_over_the_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    records = [{"prompt": f"question {number}"} for number in range(9)] + [{"messages": []}, {"prompt": ""}, {"prompt": "x" * 1000}]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    assert read_prompts(path, 3) == ["question 0", "question 3", "question 6"]
    assert len(read_prompts(path, 100)) == 9
