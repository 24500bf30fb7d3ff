"""The same command again: what is there stays, what is missing is made, and nothing is there twice."""

import json
import time

import pyarrow.parquet as pq
import pytest

from engine.errors import EngineError, UserError
from pipeline import run as run_module
from pipeline.config import load_config
from pipeline.export import export_rows
from pipeline.job import Job
from pipeline.local_folder import LocalFolder
from pipeline.part_writer import TakenOver
from pipeline.report import read_report
from pipeline.run import run_job
from tests.pipeline.conftest import read_rows, write_jsonl

RECORDS = [{"id": f"r{i}", "prompt": f"hello {i}", "params": {"n": 3} if i % 5 == 0 else None} for i in range(40)]
NUM_ROWS = 56


def parts(out):
    return {path.name: path.read_bytes() for path in (out / "rows").glob("*.parquet")}


def strip(rows):
    """What must not depend on when a row was made."""
    return [{name: row[name] for name in ("id", "sample", "row_index", "status", "token_ids", "text", "finish_reason")} for row in rows]


def break_off(out, *numbers):
    """As if the run had been killed before it wrote these parts."""
    for number in numbers:
        (out / "rows" / f"part-{number:08}.parquet").unlink()
    run = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**run, "status": "running", "exit_code": None}))


@pytest.fixture
def again(tmp_path):
    """Runs the job of `run_fake` once more."""

    def run(*overrides):
        return run_job(load_config(str(tmp_path / "job.yaml"), ["output.rows_per_file=8", *overrides]))

    return run


def test_only_the_missing_rows_are_made(run_fake, tmp_path, again, capsys):
    out = tmp_path / "out"
    code, whole = run_fake(RECORDS, "output.rows_per_file=8")
    assert (code, len(whole)) == (0, NUM_ROWS)
    break_off(out, *sorted(int(name[5:13]) for name in parts(out))[3:])
    kept = parts(out)
    run_id = json.loads((out / "run.json").read_text())["run_id"]
    assert again() == 0
    assert {name: data for name, data in parts(out).items() if name in kept} == kept
    assert strip(read_rows(out)) == strip(whole)
    err = capsys.readouterr().err
    assert f"{len([r for d in kept for r in pq.read_table(out / 'rows' / d)['id']])} of them are there already" in err
    assert "first new rows after" in err
    run = json.loads((out / "run.json").read_text())
    assert run["runs"] == [run_id, run["run_id"]]
    assert (run["status"], run["counts"]["rows"]) == ("finished", NUM_ROWS)
    assert run["timing"]["first_row_s"] > 0


def test_a_hole_in_the_middle_is_filled_even_of_a_job_that_says_it_is_finished(run_fake, tmp_path, again):
    _, whole = run_fake(RECORDS, "output.rows_per_file=8")
    (tmp_path / "out" / "rows" / "part-00000001.parquet").unlink()
    assert again() == 0
    assert strip(read_rows(tmp_path / "out")) == strip(whole)


def test_with_every_row_there_no_engine_is_started(run_fake, tmp_path, again, monkeypatch):
    run_fake(RECORDS)
    break_off(tmp_path / "out")
    monkeypatch.setattr(run_module, "execute", lambda *arguments: pytest.fail("started"))
    assert again() == 0
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("sampling.temperature=0.5", r"sampling\.temperature \(1\.0 -> 0\.5\)"),
        ("input.system=short", r"input\.system \(null -> .*short"),
        ("model.target=fake-other", r"model\.target .*smollm2-135m-instruct.* -> .*fake-other"),
        ("job.seed=1", r"job\.seed \(0 -> 1\)"),
    ],
)
def test_what_can_change_rows_is_refused(run_fake, tmp_path, again, override, told):
    run_fake(RECORDS[:3])
    before = parts(tmp_path / "out")
    break_off(tmp_path / "out")
    with pytest.raises(UserError, match=told):
        again(override)
    assert parts(tmp_path / "out") == before


def test_a_changed_line_is_refused_and_named(run_fake, tmp_path, again):
    run_fake(RECORDS[:3])
    write_jsonl(tmp_path / "in.jsonl", [*RECORDS[:2], {**RECORDS[2], "prompt": "hello 9"}])
    with pytest.raises(UserError, match=r"in\.jsonl.*sha256"):
        again()


def test_what_cannot_change_rows_may_differ(run_fake, tmp_path, again):
    run_fake(RECORDS[:3])
    break_off(tmp_path / "out")
    assert again("ray.workers=2", "engine.max_batch=3", "job.name=other", "output.rows_per_file=1", "input.max_errors=5") == 0


def test_new_files_join_a_job_that_grows(tmp_path, make_config, ray_session, capsys):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", RECORDS[:5])
    assert run_job(make_config(folder)) == 0
    before = parts(out)
    assert run_job(make_config(folder, "input.grow=true")) == 0
    assert "nothing is done" in capsys.readouterr().err
    write_jsonl(folder / "a.jsonl", [{"id": f"new{i}", "prompt": "x"} for i in range(3)])
    with pytest.raises(UserError, match=r"'a\.jsonl' is new; allowed: input\.grow=true"):
        run_job(make_config(folder))
    assert run_job(make_config(folder, "input.grow=true")) == 0
    assert {name: data for name, data in parts(out).items() if name in before} == before
    rows = read_rows(out)
    assert [row["id"] for row in rows if row["sample"] == 0] == ["r0", "r1", "r2", "r3", "r4", "new0", "new1", "new2"]
    write_jsonl(folder / "b.jsonl", RECORDS[:4])
    with pytest.raises(UserError, match=r"b\.jsonl"):
        run_job(make_config(folder, "input.grow=true"))


def test_a_new_file_without_the_columns_is_refused_before_anything_runs(tmp_path, make_config, ray_session):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", RECORDS[:3])
    assert run_job(make_config(folder)) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    write_jsonl(folder / "b.jsonl", [{"question": "x"}])
    with pytest.raises(UserError, match=r"b\.jsonl': unknown column 'prompt'"):
        run_job(make_config(folder, "input.grow=true"))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    write_jsonl(folder / "b.jsonl", [{"prompt": "x"}])
    assert run_job(make_config(folder, "input.grow=true")) == 0


def test_nothing_new_is_no_failure_of_a_job_that_grows(run_fake, again):
    assert run_fake([{"prompt": ""}, {"prompt": "x"}])[0] == 3
    assert again() == 3
    assert again("input.grow=true") == 0


def test_error_rows_are_made_again_when_asked(run_fake, tmp_path, again):
    heals = time.time() + 15
    records = [{"id": f"r{i}", "prompt": f"[[fake:broken_until={heals}]]" if i % 4 == 0 else f"hello {i}"} for i in range(20)]
    records[6] = {"id": "r6", "prompt": ""}
    code, rows = run_fake(records, "output.rows_per_file=8")
    assert (code, sum(row["status"] == "error" for row in rows)) == (3, 6)
    assert again() == 3
    time.sleep(max(0.0, heals - time.time()))
    assert again("output.retry_errors=true") == 3
    after = read_rows(tmp_path / "out")
    assert [row["id"] for row in after if row["status"] == "error"] == ["r6"]
    assert len(after) == 20
    assert [new for new, old in zip(strip(after), strip(rows), strict=True) if old["status"] == "ok" or old["id"] == "r6"] == [
        old for old in strip(rows) if old["status"] == "ok" or old["id"] == "r6"
    ]


def test_error_rows_stay_when_the_engine_that_should_retry_them_does_not_load(run_fake, tmp_path, again, monkeypatch):
    run_fake([{"prompt": "[[fake:row_error]]"}, {"prompt": "x"}])
    before = parts(tmp_path / "out")
    monkeypatch.setattr(run_module, "execute", lambda *arguments: (_ for _ in ()).throw(EngineError("no")))
    with pytest.raises(EngineError):
        again("output.retry_errors=true")
    assert parts(tmp_path / "out") == before


def test_too_many_errors_stop_the_job_and_a_higher_limit_lets_it_go_on(run_fake, tmp_path, again, capsys):
    records = [{"prompt": "[[fake:slow=0.05]]"}] * 8 + [{"prompt": ""}] * 40 + [{"prompt": "[[fake:slow=0.3]]"}] * 400
    code, rows = run_fake(records, "input.max_errors=5", "engine.max_batch=4", "output.rows_per_file=8")
    assert code == 6
    assert 6 <= sum(row["status"] == "error" for row in rows) < len(rows) < len(records)
    assert "rows failed; input.max_errors=5" in capsys.readouterr().err
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (run["status"], run["exit_code"]) == ("stopped", 6)
    assert again("engine.max_batch=400") == 3
    assert len(read_rows(tmp_path / "out")) == len(records)


def test_a_row_that_is_there_twice_is_told(run_fake, tmp_path, again):
    run_fake(RECORDS[:3])
    rows = tmp_path / "out" / "rows"
    (rows / "part-00000007.parquet").write_bytes((rows / "part-00000000.parquet").read_bytes())
    break_off(tmp_path / "out")
    with pytest.raises(EngineError, match="there already"):
        again()


def test_rows_that_an_overwriting_run_left_over_when_it_was_killed_go(run_fake, tmp_path, again):
    _, whole = run_fake(RECORDS, "output.rows_per_file=8")
    out = tmp_path / "out"
    old = parts(out)
    assert again("output.overwrite=true", "job.seed=1") == 0
    assert not set(old) & set(parts(out))
    name = next(iter(old))
    (out / "rows" / name).write_bytes(old[name])
    break_off(out, max(int(name[5:13]) for name in parts(out)))
    assert again("job.seed=1") == 0
    assert name not in parts(out)
    assert len(read_rows(out)) == NUM_ROWS
    assert strip(read_rows(out)) != strip(whole)


def test_a_run_that_was_taken_over_before_its_first_row_writes_nothing(run_fake, tmp_path, again, monkeypatch):
    run_fake(RECORDS, "output.rows_per_file=8")
    out = tmp_path / "out"
    break_off(out, 2, 3)
    before = parts(out)
    announce = Job.announce

    def be_overtaken(job):
        announce(job)
        (out / "run.json").write_text(json.dumps({**job.run, "run_id": "newer"}))

    monkeypatch.setattr(Job, "announce", be_overtaken)
    with pytest.raises(TakenOver):
        again()
    assert parts(out) == before
    assert json.loads((out / "run.json").read_text())["run_id"] == "newer"


def test_what_the_options_came_to_is_in_run_json_before_the_first_part(run_fake, tmp_path, monkeypatch):
    """Else a job of model.dtype=auto that is killed could go on with another dtype."""
    create, seen = LocalFolder.create, []

    def look(folder, name, data):
        seen.append(json.loads(folder.read("run.json")).get("engine"))
        create(folder, name, data)

    monkeypatch.setattr(LocalFolder, "create", look)
    run_fake(RECORDS[:3])
    assert seen == [json.loads((tmp_path / "out" / "run.json").read_text())["engine"]]
    assert seen[0]["dtype"] == "none"


def test_a_job_on_s3_from_end_to_end(s3_bucket, tmp_path, make_config, ray_session, capsys, monkeypatch):
    for number in (0, 1):
        s3_bucket.put(f"in/{number}.jsonl", "".join(json.dumps(record) + "\n" for record in RECORDS[number::2]).encode())
    out = f"s3://{s3_bucket.name}/jobs/out"
    options = [f"output.path={out}", "output.rows_per_file=8"]
    options += [f"{name}.storage_options.endpoint_url={s3_bucket.url}" for name in ("input", "output")]
    job = make_config([f"s3://{s3_bucket.name}/in/"], *options)
    assert run_job(job) == 0
    keys = [key for key in s3_bucket.list_keys() if key.startswith("jobs/")]
    assert [key for key in keys if not key.startswith("jobs/out/rows/part-")] == ["jobs/out/run.json"]
    said = s3_bucket.client.get_object(Bucket=s3_bucket.name, Key="jobs/out/run.json")["Body"].read().decode()
    assert "rheo-secret" not in said
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_bucket.url)
    assert f"{NUM_ROWS} of {NUM_ROWS} rows" in read_report(out)
    capsys.readouterr()
    import sys

    export_rows(out, sys.stdout)
    whole = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({(row["id"], row["sample"]) for row in whole}) == len(whole) == NUM_ROWS
    assert run_job(job) == 0
    assert "nothing is done" in capsys.readouterr().err
    for key in keys[2:4]:
        s3_bucket.client.delete_object(Bucket=s3_bucket.name, Key=key)
    assert run_job(job) == 0
    capsys.readouterr()
    export_rows(out, sys.stdout)
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(map(str, strip(again))) == sorted(map(str, strip(whole)))
    with pytest.raises(UserError, match=r"sampling\.top_k"):
        run_job(make_config([f"s3://{s3_bucket.name}/in/"], *options, "sampling.top_k=5"))
    assert run_job(make_config([f"s3://{s3_bucket.name}/in/"], *options, "sampling.top_k=5", "output.overwrite=true")) == 0
    assert len([key for key in s3_bucket.list_keys() if "/rows/" in key]) <= 8
