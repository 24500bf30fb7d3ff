"""What becomes of errors that come once Ray has started."""

from __future__ import annotations

import json

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from engine.errors import EngineError, UserError
from pipeline import run as run_module
from pipeline.execute import _explain as explain
from pipeline.execute import execute
from pipeline.run import run_job
from tests.pipeline.conftest import read_rows, write_jsonl


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "in.jsonl' cannot be read: No such file or directory"),
        (lambda path: path.write_text("{}\n" * 20), "in.jsonl' has changed since this run began"),
    ],
)
def test_input_that_goes_away_is_no_user_error(tmp_path, make_config, ray_session, monkeypatch, spoil, message):
    """Nobody asked for what cannot be done: the job can be resumed."""
    records = [{"prompt": f"p{i}"} for i in range(20)]
    source = write_jsonl(tmp_path / "in.jsonl", records)

    def spoil_first(*args):
        spoil(source)
        return execute(*args)

    monkeypatch.setattr(run_module, "execute", spoil_first)
    with pytest.raises(EngineError, match=message):
        run_job(make_config(source))
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (run["status"], run["exit_code"]) == ("failed", 5)
    monkeypatch.undo()
    write_jsonl(source, records)
    assert run_job(make_config(source)) == 0
    assert len(read_rows(tmp_path / "out")) == 20


def test_of_an_engine_that_fails_the_traceback_is_in_the_log(run_fake, tmp_path):
    with pytest.raises(EngineError) as caught:
        run_fake([{"prompt": "x"}], "model.target=fake-broken")
    said = "the fake engine was told not to load (model.target=fake-broken)"
    assert str(caught.value) == f"{said} (all of it is in ray.log)"
    log = (tmp_path / "out" / "ray.log").read_text()
    assert "Traceback" in log and 'File "' in log and f"EngineError: {said}" in log


TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 1, in load
    raise ValueError
ValueError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in load
    run()
    ~~~^^
torch.AcceleratorError: CUDA error: an illegal memory access
CUDA kernel errors might be reported asynchronously
  For debugging pass CUDA_LAUNCH_BLOCKING=1
"""


def test_one_line_is_said_of_any_error(capsys):
    state = {"refusal": None, "failures": ["an older one", TRACEBACK]}
    found = explain(ActorDiedError(), state)
    assert str(found) == "torch.AcceleratorError: CUDA error: an illegal memory access (all of it is in ray.log)"
    assert TRACEBACK in capsys.readouterr().out
    assert str(explain(ActorDiedError(), {**state, "failures": ["engines died 6 times"]})) == "engines died 6 times"
    found = explain(RayTaskError("read", TRACEBACK, ValueError("no")), state)
    assert str(found) == "torch.AcceleratorError: CUDA error: an illegal memory access (all of it is in ray.log)"


def test_only_what_the_engine_refuses_is_a_user_error():
    state = {"refusal": None, "failures": []}
    error = RayTaskError("read", "traceback", UserError("the input is gone\nRay's advice"))
    for refusal, kind, message in ((None, EngineError, "the input is gone"), ("too long a text", UserError, "too long a text")):
        found = explain(error, {**state, "refusal": refusal})
        assert (type(found), str(found)) == (kind, message)
