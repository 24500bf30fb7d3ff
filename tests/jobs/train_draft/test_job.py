"""`rheo train-draft` from prompts to a draft that an engine loads, in one go and through kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine import Engine, Request, SamplingParams, Speculation
from engine.errors import UserError
from jobs.train_draft import checkpoints
from jobs.train_draft.config import load_train_config
from jobs.train_draft.run import train_draft
from tests.tiny_models import tiny_llama

NUM_PROMPTS = 200


@pytest.fixture
def job(tmp_path) -> Path:
    target = tiny_llama(tmp_path / "target", vocab=64, hidden=48, layers=6, scale=0.25)
    prompts = [
        {"id": f"p{n}", "prompt": " ".join(f"w{3 + (7 * n + 5 * k * k) % 61}" for k in range(3 + n % 8))} for n in range(NUM_PROMPTS)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    sections = {
        "input": {"path": str(tmp_path / "prompts.jsonl")},
        "model": {"target": str(target)},
        "sampling": {"max_tokens": 48, "ignore_eos": True},
        "ray": {"threads_per_worker": 1},
        "output": {"path": str(tmp_path / "out"), "rows_per_file": 40},
        "train": {"steps": 240, "batch": 16, "queries": 16, "draft_steps": 3, "learning_rate": 0.003, "warmup": 20, "validation": 0.1},
        "evaluation": {"prompts": 6, "max_tokens": 16, "tree_size": 12, "depth": 3},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(sections))
    return tmp_path / "job.yaml"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("output.path=s3://bucket/out", "output.path='s3://bucket/out'; allowed: a local folder"),
        ("output.overwrite=true", "output.overwrite=true; allowed: false"),
        ("draft.vocab_size=65", "draft.vocab_size=65; allowed: at most 64"),
        ("draft.init=ngram", "draft.init='ngram' is of the kind ngram; allowed: target, or an EAGLE-3 head"),
        ("draft.feature_layers=[1,6]", "draft.feature_layers=[1, 6]; allowed: 0 to 5"),
        ("train.learning_rate=0", "train.learning_rate=0.0; allowed: a number above 0, below 1"),
        ("evaluation.methods=[rhea]", "evaluation.methods=['rhea']; allowed: a list of rheo, coupled"),
        ("input.path=nowhere.jsonl", "input.path 'nowhere.jsonl' matches no file"),
        ("answers.given=nothing", "no record can be used: p0: has no text and no token ids in nothing"),
    ],
)
def test_options_are_refused_before_anything_is_made(job, override, words):
    with pytest.raises(UserError) as refused:
        train_draft(load_train_config(str(job), [override]))
    assert words in str(refused.value)
    assert not [path.name for path in (job.parent / "out").rglob("*") if path.is_file() and path.name != ".lock"]


def start(job: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "jobs.cli", "train-draft", str(job), *overrides]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def check_result(out: Path) -> None:
    """A draft that an engine loads, better than an untrained one; no answer twice."""
    rows = pq.read_table(out / "answers" / "rows").to_pylist()
    assert len({row["id"] for row in rows}) == len(rows) == NUM_PROMPTS
    validations = [entry for entry in checkpoints.read_log(out / "training") if "validation" in entry]
    before, after = (entry["validation"]["acceptance"] for entry in (validations[0], validations[-1]))
    assert (validations[0]["step"], validations[-1]["step"]) == (0, 240)
    assert all(late > early + 0.1 for early, late in zip(before, after, strict=True)), (before, after)
    engine = Engine.load(out.parent / "target", out / "draft", speculation=Speculation(tree_size=12, depth=3), dtype="float32")
    (result,) = engine.generate([Request(id="a", prompt="w5 w9", params=SamplingParams(max_tokens=24, ignore_eos=True))])
    assert sum(cycle.accepted for cycle in result.cycles) > 0
    assert json.loads((out / "tau.json").read_text())["rheo"] > 1.1


def test_a_draft_is_trained_and_a_second_run_has_nothing_to_do(job):
    first = start(job)
    output, _ = first.communicate(timeout=400)
    assert first.returncode == 0, output
    check_result(job.parent / "out")
    weights = (job.parent / "out" / "draft" / "model.safetensors").read_bytes()
    again = start(job)
    output, _ = again.communicate(timeout=400)
    assert again.returncode == 0, output
    assert "train: step" not in output
    assert (job.parent / "out" / "draft" / "model.safetensors").read_bytes() == weights
    refused = start(job, "train.validation=0.2")
    output, _ = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "train.validation=0.2, and" in output
    assert "was begun with 0.1" in output


def test_a_job_that_is_killed_in_each_stage_goes_on(job):
    out = job.parent / "out"
    stages = {
        "answers": lambda: any(out.glob("answers/rows/*.parquet")),
        "features": lambda: any(out.glob("features/*.safetensors")),
        "training": lambda: checkpoints.last_step(out / "training") >= 20,
        "evaluation": lambda: any(out.glob("evaluation/*/rheo/run.json")),
    }
    steps = []
    for stage, has_begun in stages.items():
        process = start(job, "train.checkpoint_s=0.5", "train.validate_every=40")
        until = time.monotonic() + 300
        while not has_begun():
            assert process.poll() is None, (stage, process.stdout.read())
            assert time.monotonic() < until, stage
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        steps.append(checkpoints.last_step(out / "training"))
    last = start(job)
    output, _ = last.communicate(timeout=400)
    assert last.returncode == 0, output
    assert 20 <= steps[2] < 240 == steps[3]
    check_result(out)


def test_given_answers_are_learnt_from_and_an_interrupt_keeps_the_last_state(job):
    out, source = job.parent / "out", job.parent / "prompts.jsonl"
    records = [json.loads(line) for line in source.read_text().splitlines()]
    given = [{**record, "answer": " ".join(3 * record["prompt"].split())} for record in records]
    given[2]["answer"] = [5, 9, 2, 7]
    bad = [{"id": "none", "prompt": "w4"}, {"id": "beyond", "prompt": "w4", "answer": [5, 9, 64, 7]}]
    source.write_text("".join(json.dumps(record) + "\n" for record in [*given, *bad]))
    overrides = ["answers.given=answer", "evaluation.prompts=0", "train.checkpoint_s=0.2", "train.steps=2000", "train.validate_every=2000"]
    first = start(job, *overrides)
    until = time.monotonic() + 300
    while checkpoints.last_step(out / "training") < 20:
        assert first.poll() is None, first.stdout.read()
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGINT)
    output, _ = first.communicate(timeout=100)
    assert first.returncode == 130, output
    assert "2 records left out: none: has no text and no token ids in answer; beyond: token id 64 in answer; allowed: 0 to 63" in output
    assert "interrupted; the same command goes on from here" in output
    step = checkpoints.last_step(out / "training")
    again = start(job, *overrides[:-2], f"train.steps={step + 10}")
    output, _ = again.communicate(timeout=400)
    assert again.returncode == 0, output
    assert checkpoints.last_step(out / "training") == step + 10
    (part, *_) = sorted(out.glob("answers/rows/*.parquet"))
    row, _, row_of_ids, *_ = pq.read_table(part).to_pylist()
    assert row["token_ids"] == [*(int(word[1:]) for word in given[0]["answer"].split()), 2]  # and EOS
    assert row_of_ids["token_ids"] == given[2]["answer"]
    source.write_text(source.read_text().replace("w3", "w4"))
    refused = start(job, *overrides)
    output, _ = refused.communicate(timeout=60)
    assert refused.returncode == 2, output
    assert "'prompts.jsonl' is not as it was" in output
