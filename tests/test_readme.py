"""What the README shows exists: targets, commands, files, configurations, and the Python calls. Nothing is generated here."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from engine.params import SamplingParams
from pipeline.config import check_sampling, load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))


def fenced_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


@functools.cache
def is_rheo_command(command: str) -> bool:
    code = "import sys; from pipeline.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode == 0


def check_job(path: Path, overrides: list[str] | None = None) -> None:
    config = load_config(str(path), overrides or [])
    check_sampling(config.sampling)
    config.speculation.to_speculation().check()
    assert (ROOT / config.input.path).exists()


def shell_lines() -> list[list[str]]:
    return [shlex.split(line, comments=True) for block in fenced_blocks(README, "bash") for line in block.splitlines() if line]


def test_readme_shows_the_two_commands():
    lines = shell_lines()
    assert ["make", "demo"] in lines
    assert ["make", "test"] in lines


@pytest.mark.parametrize("words", shell_lines(), ids=" ".join)
def test_shell_command_exists(words):
    program, command, *arguments = words
    if program == "make":
        assert command in make_targets()
        return
    assert program == ".venv/bin/rheo"
    assert is_rheo_command(command)
    overrides = [word for word in arguments if "=" in word]
    for word in arguments:
        if word.endswith(".yaml"):
            check_job(ROOT / word, overrides)


def test_unknown_command_is_refused():
    assert not is_rheo_command("rnu")


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_shipped_job_loads(path):
    check_job(path)


@pytest.mark.parametrize("block", fenced_blocks(README, "yaml"))
def test_readme_job_loads(block, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(block, encoding="utf-8")
    check_job(path)


def call_target(node: ast.expr, names: dict[str, object]) -> object | None:
    """What `node` names, if it starts at one of `names`: a class, or a method of one."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = call_target(node.value, names)
        return None if owner is None else getattr(owner, node.attr)
    return None


def test_python_example_fits_the_signatures():
    (block,) = fenced_blocks(README, "python")
    tree = ast.parse(block)
    names = {
        alias.name: getattr(importlib.import_module(node.module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    calls = [(call_target(node.func, names), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    checked = [(target, node) for target, node in calls if target is not None]
    assert len(checked) >= len(names)
    for target, node in checked:
        inspect.signature(target).bind(*node.args, **{keyword.arg: keyword.value for keyword in node.keywords})


def test_quickstart_prompts():
    rows = [json.loads(line) for line in (ROOT / "jobs/quickstart.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) >= 24
    for row in rows:
        assert ("prompt" in row) != ("messages" in row), row["id"]
        SamplingParams.from_mapping(row.get("params", {}))
