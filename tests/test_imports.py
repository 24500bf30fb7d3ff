"""Imports point downward only: jobs > pipeline > workers > engine > engine.law.

The files are parsed, so an import inside a function counts too; what modules pull in indirectly is seen by importing them in a
fresh interpreter.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("engine.law", "engine", "workers", "pipeline", "jobs")  # from the bottom up
FOLDERS = ("engine", "workers", "pipeline", "jobs")
TORCH_FREE = ("engine.errors", "engine.params", "engine.models.presets")  # what pipeline may import at module level


class Import(NamedTuple):
    module: str
    line: int
    deferred: bool  # inside a function, or for type checkers only


class ImportCollector(ast.NodeVisitor):
    def __init__(self, root: Path, package: str):
        self.root, self.package = root, package
        self.imports: list[Import] = []
        self.depth = 0

    def add(self, module: str, node: ast.AST) -> None:
        self.imports.append(Import(module, node.lineno, self.depth > 0))

    def visit_deferred(self, nodes: list[ast.stmt]) -> None:
        self.depth += 1
        for node in nodes:
            self.visit(node)
        self.depth -= 1

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.visit_deferred(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.visit_deferred(node.body)
            node = ast.If(test=node.test, body=[], orelse=node.orelse)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:  # in package a.b: `.` is a.b, `..` is a
            parents = self.package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
        for alias in node.names:
            path = self.root.joinpath(*base.split("."), alias.name)
            is_module = path.is_dir() or path.with_suffix(".py").is_file()
            self.add(f"{base}.{alias.name}" if is_module else base, node)

    def visit_Call(self, node: ast.Call) -> None:
        is_import = ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
        if is_import and node.args and isinstance(node.args[0], ast.Constant):
            self.add(str(node.args[0].value), node)
        self.generic_visit(node)


def source_files(root: Path) -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    return next((layer for layer in LAYERS if module == layer or module.startswith(layer + ".")), None)


def complaint(layer: str, found: Import) -> str | None:
    """What is wrong with an import in a module of `layer`, None if nothing."""
    top, target = found.module.partition(".")[0], layer_of(found.module)
    if top == "infra" and layer == "jobs" and found.deferred:
        return None  # a job that is run from a checkout may start its servers
    if top in ("tests", "infra"):
        return f"{top} is imported by nobody"
    if target and LAYERS.index(target) > LAYERS.index(layer):
        return f"{target} is above {layer}"
    if layer == "engine.law" and target != layer and top != "torch" and top not in sys.stdlib_module_names:
        return "engine.law imports torch only"
    if layer == "engine" and top == "ray":
        return "engine imports no ray"
    if layer == "pipeline" and top == "torch":
        return "pipeline imports no torch"
    if layer == "pipeline" and target in ("workers", "engine", "engine.law") and not found.deferred and found.module not in TORCH_FREE:
        return "pipeline imports it inside functions only"
    return None


def find_violations(root: Path) -> list[str]:
    violations = []
    for path in source_files(root):
        module = module_name(path, root)
        collector = ImportCollector(root, module if path.name == "__init__.py" else module.rpartition(".")[0])
        collector.visit(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))
        for found in collector.imports:
            if reason := complaint(layer_of(module), found):
                violations.append(f"{path.relative_to(root)}:{found.line}: {found.module}: {reason}")
    return violations


def import_all(folder: str, root: Path, blocked: str | None = None) -> set[str]:
    """The names in sys.modules after importing every module of `folder` in a fresh interpreter that has no `blocked`."""
    modules = [module_name(path, root) for path in sorted((root / folder).rglob("*.py")) if path.name != "__main__.py"]
    assert modules
    code = (
        "import importlib, json, sys\n"
        # None makes `import` raise ModuleNotFoundError and find_spec() return None, as if it were not installed
        "blocked, modules = json.loads(sys.argv[1])\n"
        "if blocked: sys.modules[blocked] = None\n"
        "for name in modules: importlib.import_module(name)\n"
        "print(json.dumps([name for name, module in sys.modules.items() if module]))\n"
    )
    command = [sys.executable, "-c", code, json.dumps([blocked, modules])]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(json.loads(done.stdout.splitlines()[-1]))


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")


def test_imports_point_downward():
    scanned = {layer_of(module_name(path, ROOT)) for path in source_files(ROOT)}
    assert scanned >= {"engine.law", "engine", "workers", "pipeline"}
    assert find_violations(ROOT) == []


def test_engine_imports_without_ray():
    assert "engine.params" in import_all("engine", ROOT, blocked="ray")


def test_pipeline_loads_no_torch():
    loaded = import_all("pipeline", ROOT)
    assert "pipeline" in loaded
    assert "torch" not in loaded


VIOLATIONS = {
    "law, third party": ("engine/law/tree.py", "import numpy"),
    "law, engine": ("engine/law/tree.py", "from engine.params import Cycle"),
    "law, relative": ("engine/law/tree.py", "from ..params import Cycle"),
    "law, in a function": ("engine/law/tree.py", "def f():\n    import scipy"),
    "engine, ray": ("engine/loop.py", "def f():\n    import ray.data"),
    "engine, ray by name": ("engine/loop.py", "import importlib\nray = importlib.import_module('ray')"),
    "engine, workers": ("engine/loop.py", "from workers import actor"),
    "engine, pipeline": ("engine/loop.py", "import pipeline.config as c"),
    "workers, pipeline": ("workers/actor.py", "class A:\n    async def f(self):\n        from pipeline import config"),
    "pipeline, torch": ("pipeline/sink.py", "def f():\n    from torch import nn"),
    "pipeline, engine": ("pipeline/sink.py", "from engine import Engine"),
    "pipeline, law": ("pipeline/sink.py", "from engine.law import tree"),
    "pipeline, workers": ("pipeline/sink.py", "if True:\n    try:\n        import workers.actor\n    except ImportError:\n        pass"),
    "pipeline, jobs": ("pipeline/sink.py", "from jobs import bench"),
    "anybody, tests": ("jobs/bench.py", "from tests.engine import tables"),
}

ALLOWED = {
    "law": (
        "engine/law/tree.py",
        "import math\nimport torch.nn.functional as F\nfrom torch import Tensor\nfrom . import draws\nimport engine.law",
    ),
    "engine": ("engine/loop.py", "import torch, transformers\nfrom engine.law import tree\nfrom engine.params import Cycle"),
    "workers": ("workers/actor.py", "import ray\nfrom engine import Engine"),
    "pipeline": ("pipeline/sink.py", "import ray\nfrom engine import params\nfrom engine.errors import UserError\nfrom . import config"),
    "pipeline, deferred": ("pipeline/sink.py", "def f():\n    from engine import Engine\n    from workers.actor import Generate"),
    "pipeline, types": ("pipeline/sink.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from engine import Engine"),
    "jobs": ("jobs/bench.py", "import torch\nimport pipeline.config\nfrom engine.law import tree"),
}

TREE = {"engine/__init__.py": "", "engine/params.py": "", "engine/errors.py": "", "engine/law/__init__.py": "", "pipeline/config.py": ""}


@pytest.mark.parametrize("path, source", VIOLATIONS.values(), ids=VIOLATIONS)
def test_violation_is_found(tmp_path, path, source):
    write_tree(tmp_path, TREE | {path: source})
    (violation,) = find_violations(tmp_path)
    assert violation.startswith(f"{path}:")


@pytest.mark.parametrize("path, source", ALLOWED.values(), ids=ALLOWED)
def test_allowed_import_is_not_found(tmp_path, path, source):
    write_tree(tmp_path, TREE | {path: source})
    assert find_violations(tmp_path) == []


def test_indirect_import_is_seen(tmp_path):
    write_tree(tmp_path, {"torch.py": "", "helper.py": "import torch", "pipeline/__init__.py": "", "pipeline/rows.py": "import helper"})
    assert "torch" in import_all("pipeline", tmp_path)


def test_blocked_import_fails(tmp_path):
    write_tree(tmp_path, {"ray.py": "", "helper.py": "import ray", "engine/__init__.py": "", "engine/loop.py": "import helper"})
    assert "ray" in import_all("engine", tmp_path)
    with pytest.raises(AssertionError, match="ModuleNotFoundError: import of ray halted"):
        import_all("engine", tmp_path, blocked="ray")
