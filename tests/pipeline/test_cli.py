"""The command as a user meets it: exit codes, what is printed where, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
import s3fs
from botocore.exceptions import NoCredentialsError
from transformers import LlamaConfig

from pipeline.cli import app, call
from tests.pipeline.conftest import read_rows, write_jsonl
from tests.tiny_models import tiny_eagle3, tiny_llama

ROOT = Path(__file__).parents[2]
RHEO = [sys.executable, "-m", "pipeline.cli"]


@pytest.fixture
def job(tmp_path):
    """A fake job over records; gives the YAML's path."""

    def make(records: list) -> Path:
        write_jsonl(tmp_path / "in.jsonl", records)
        path = tmp_path / "job.yaml"
        path.write_text(f"input: {{path: '{tmp_path}/in.jsonl'}}\nengine: {{kind: fake}}\noutput: {{path: '{tmp_path}/out'}}\n")
        return path

    return make


def run_rheo(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([*RHEO, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120)


def call_rheo(*arguments) -> int:
    """In this process, on the shared Ray."""
    return call(lambda **options: app([str(a) for a in arguments], **options))


def test_importing_the_pipeline_loads_no_torch():
    modules = [f"pipeline.{path.stem}" for path in (ROOT / "pipeline").glob("*.py") if path.stem != "__init__"]
    code = f"import sys\nfor name in {modules}: __import__(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_job_prints_progress_and_a_summary_and_nothing_of_ray(job, tmp_path):
    done = run_rheo("run", job([{"prompt": f"p{i}"} for i in range(20)]))
    assert done.returncode == 0, done.stderr
    assert "20 of 20 rows" in done.stdout
    assert all(line.startswith(("rheo: ", "0/20", "20/20")) or "/20 rows" in line for line in done.stderr.splitlines()), done.stderr
    report = run_rheo("report", tmp_path / "out")
    assert (report.returncode, report.stdout) == (0, done.stdout)


@pytest.mark.parametrize(
    ("records", "code", "said"),
    [
        ([{"prompt": "a"}, {"prompt": ""}], 3, ""),
        ([{"prompt": ""}], 4, ""),
        ([{"prompt": "a"}], 5, "engine failure"),
    ],
)
def test_exit_codes_of_failed_rows_and_engines(job, capsys, ray_session, records, code, said):
    target = "model.target=fake-broken" if code == 5 else "model.target=fake"
    assert call_rheo("run", job(records), target) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.temprature=1"], "did you mean 'temperature'"),
        (["input.path=/nowhere/x.jsonl"], "matches no file"),
        (["output.path=/proc/nowhere"], "cannot be made"),
        (["engine.kind=real", "model.target=smolm2-135m-instruct"], "did you mean 'smollm2-135m-instruct'"),
    ],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_a_user_error_is_one_line_without_traceback(job, tmp_path, capsys, command, overrides, message):
    assert call_rheo(command, job([{"prompt": "x"}]), *overrides) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
    assert not (tmp_path / "out" / "rows").exists()


def test_user_errors_in_a_process_of_their_own(tmp_path):
    done = run_rheo("run", tmp_path / "nope.yaml")
    assert done.returncode == 2
    assert done.stderr == f"rheo: job file '{tmp_path}/nope.yaml' does not exist\n"
    assert run_rheo("report", tmp_path).returncode == 2
    assert run_rheo("frobnicate").returncode == 2


def test_check_says_what_the_job_would_do_and_leaves_nothing(job, tmp_path, capsys):
    assert call_rheo("check", job([{"prompt": "x"}, "{"]), "sampling.n=3") == 0
    out = capsys.readouterr().out
    assert "2 records in 1 file make 4 rows" in out
    assert "bad_record: 1, for instance in.jsonl:2: invalid JSON" in out
    assert not (tmp_path / "out").exists()


def test_check_shows_a_prompt_and_what_is_left_out(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "docs.csv").write_text("document\na\x1b[31m\n\n")
    (folder / "more.jsonl").write_text('{"document": null}\n')
    (folder / "README.md").write_text("")
    template = "  template: |\n    Summarise:\n    {{ document }}\n"
    job = f"input:\n  path: {folder}\n{template}engine: {{kind: fake}}\noutput: {{path: {tmp_path}/out}}\n"
    (tmp_path / "job.yaml").write_text(job)
    assert call_rheo("check", tmp_path / "job.yaml") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  input    2 records in 2 files (1 csv, 1 jsonl) make 2 rows"
    assert lines[-4:] == [
        "  left out 1, as no input (another suffix, hidden, or a link to a folder): README.md",
        "  first 2 rows: 1 readable, 1 would be error rows",
        "    docs.csv:2: Summarise: a [31m",
        "    template_error: 1, for instance more.jsonl:1: input.template: 'document' is undefined (missing or null)",
    ]


def test_check_refuses_what_run_refuses(job, tmp_path, capsys, ray_session):
    path = job([{"prompt": "x"}])
    assert call_rheo("run", path) == 0
    assert call_rheo("check", path) == 0
    assert "finished already" in capsys.readouterr().out
    for command in ("run", "check"):
        assert call_rheo(command, path, "sampling.temperature=0.5") == 2
        assert "differs in sampling.temperature" in capsys.readouterr().err
    (tmp_path / "out" / "run.json").write_text("{}")
    assert call_rheo("report", tmp_path / "out") == 2
    assert "is not of a run of this rheo" in capsys.readouterr().err


def test_check_sees_a_head_that_was_made_for_another_target(job, tmp_path, capsys):
    head = tiny_eagle3(tmp_path / "head", LlamaConfig(vocab_size=40))
    models = [f"model.target={tiny_llama(tmp_path / 'target')}", f"model.draft={head}"]
    assert call_rheo("check", job([{"prompt": "x"}]), "engine.kind=real", *models) == 2
    assert "the target has vocab_size=32" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_the_start_ends_the_command(tmp_path, number, code):
    """By a handler: without one a container's process 1 would get no SIGTERM."""
    path = tmp_path / "job.yaml"
    os.mkfifo(path)
    with subprocess.Popen([*RHEO, "run", str(path)], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while True:
            try:
                writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                break
            except OSError:  # nobody reads yet
                time.sleep(0.1)
                assert process.poll() is None
        time.sleep(0.2)
        process.send_signal(number)
        try:
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
            os.close(writer)
    assert process.returncode == code, err
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_ray_starts_ends_the_command(job, tmp_path, number, code):
    with subprocess.Popen([*RHEO, "run", str(job([{"prompt": "x"}]))], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "out" / "ray.log").exists():
            time.sleep(0.01)
            assert process.poll() is None
        time.sleep(0.1)
        process.send_signal(number)
        sent_at = time.monotonic()
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code, err
    assert ("rheo: stopping\n" in err) == (number == signal.SIGINT)
    assert "Traceback" not in err
    assert time.monotonic() - sent_at < 20


@pytest.mark.parametrize("error", [aiohttp.ClientPayloadError("cut short"), NoCredentialsError(), OSError("broken")])
def test_a_store_that_fails_is_no_traceback(job, tmp_path, capsys, monkeypatch, error):
    def fail(*args):
        raise error

    path = job([{"prompt": "x"}])
    for module in ("check.read_earlier", "report.summarize", "export.list_parts"):
        monkeypatch.setattr(f"pipeline.{module}", fail)
    monkeypatch.setattr("pipeline.runfile.read", lambda folder: {})
    for arguments in (("check", path), ("report", tmp_path / "out"), ("export", tmp_path / "out")):
        assert call_rheo(*arguments) == 2
        assert capsys.readouterr().err.startswith(f"rheo: output.path '{tmp_path}/out' cannot be used: ")


@pytest.mark.parametrize("command", ["report", "export"])
def test_an_output_in_a_store_that_cannot_be_reached(capsys, monkeypatch, s3_credentials, command):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()  # those know the endpoint of before
    assert call_rheo(command, "s3://some/out") == 2
    message = "rheo: output.path 's3://some/out' at http://127.0.0.1:9: the endpoint cannot be reached, for key 'out' in bucket 'some'"
    assert capsys.readouterr().err.startswith(message)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("number", "to_group", "code"),
    [
        (signal.SIGINT, True, 130),  # as a terminal does
        (signal.SIGTERM, False, 143),  # as a container's runtime does
    ],
)
def test_a_signal_keeps_the_finished_rows(job, tmp_path, number, to_group, code):
    path = job([{"prompt": f"[[fake:slow=0.5]] {i}"} for i in range(2000)])
    with subprocess.Popen(
        [*RHEO, "run", str(path), "engine.max_batch=4", "output.rows_per_file=8"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        while not list((tmp_path / "out").glob("rows/*.parquet")):
            time.sleep(0.1)
            assert process.poll() is None
        started = time.monotonic()
        (os.killpg if to_group else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert time.monotonic() - started < 30
    assert "Traceback" not in err
    rows = read_rows(tmp_path / "out")
    assert 0 < len(rows) < 2000
    assert len({row["row_index"] for row in rows}) == len(rows)
    assert f"interrupted, {len(rows)} of 2000 rows" in out
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (run["status"], run["exit_code"], run["counts"]["rows"]) == ("interrupted", code, len(rows))
    assert call_rheo("run", path, "engine.max_batch=500") == 0
    assert [row["row_index"] for row in read_rows(tmp_path / "out")] == list(range(2000))


def test_export_writes_lines_for_other_programs(job, tmp_path, ray_session):
    path = job([{"prompt": f"é {i}", "topic": {"n": i}} for i in range(300)] + ["{"])
    assert call_rheo("run", path, "sampling.logprobs=true") == 3
    done = run_rheo("export", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["row_index"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len(rows) == 301
    assert rows[7]["meta"] == {"topic": {"n": 7}}
    assert rows[7]["prompt"] == "<|user|>\né 7\n<|assistant|>\n"
    assert rows[300]["error_type"] == "bad_record"
    command = f"{' '.join(map(str, RHEO))} export {tmp_path / 'out'} | head -n 2"
    piped = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (len(piped.stdout.splitlines()), piped.stderr) == (2, "")
    refused = run_rheo("export", tmp_path / "out", "--format", "json")
    assert (refused.returncode, refused.stderr) == (2, "rheo: unknown --format 'json'; did you mean 'jsonl'? (allowed: jsonl)\n")
    assert run_rheo("export", tmp_path).returncode == 2
