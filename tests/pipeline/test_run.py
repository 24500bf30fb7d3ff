"""Whole jobs on the fake engine through a real Ray."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from engine.errors import EngineError, UserError
from pipeline import run as run_module
from pipeline.execute import Outcome
from pipeline.report import read_report
from pipeline.run import run_job
from pipeline.schema import SCHEMA
from tests.pipeline.conftest import read_rows, write_jsonl


def test_every_kind_of_row_in_one_job(run_fake, tmp_path, capsys):
    records = [{"id": f"r{i}", "prompt": f"hello {i}", "topic": "sea"} for i in range(40)]
    records[3] = "{broken"
    records[5] = {"id": "empty", "prompt": "", "params": {"seed": 9}}
    records[7] = {"id": "params", "prompt": "x", "params": {"n": 3, "max_tokens": 2, "seed": 9}}
    records[8] = {"id": "keys", "prompt": "x", "params": json.dumps({"stop": ["z"], "top_p": 0.5})}
    records[9] = {"id": "bad", "prompt": "x", "params": {"temperature": "hot"}}
    records[11] = {"id": "talk", "messages": [{"role": "user", "content": "hi"}]}
    records[13] = {"id": "fails", "prompt": "[[fake:row_error]]"}
    records[15] = {"id": "template", "prompt": "[[fake:template]]"}
    records[17] = {"id": "long", "prompt": "long " * 600, "params": {"n": 1}}
    options = ["sampling.n=2", "input.system=be brief", "output.rows_per_file=16", "job.seed=5", "model.max_model_len=500"]
    code, rows = run_fake(records, *options)
    assert code == 3
    assert len({(row["id"], row["sample"]) for row in rows}) == len(rows) == 40 * 2 + 1 - 1 - 1 - 1
    by_key = {(row["id"], row["sample"]): row for row in rows}
    assert [row["error_type"] for row in rows if row["status"] == "error"] == [
        "bad_record", "empty_prompt", "empty_prompt", "bad_params", "fake_error", "fake_error", "template_error", "template_error",
        "prompt_too_long",
    ]  # fmt: skip
    assert by_key["in.jsonl:4", 0]["error_message"].startswith("in.jsonl:4: invalid JSON")
    assert by_key["fails", 1]["prompt"] is not None
    assert by_key["long", 0]["num_prompt_tokens"] > 600
    ok = [row for row in rows if row["status"] == "ok"]
    for row in ok:
        assert row["num_output_tokens"] == len(row["token_ids"]) == 1 + sum(cycle["emitted"] for cycle in row["cycles"])
        assert row["num_cycles"] == len(row["cycles"]) == sum(row["acceptance_histogram"])
        assert row["num_accepted_tokens"] == sum(n * count for n, count in enumerate(row["acceptance_histogram"]))
        assert len(row["acceptance_histogram"]) == 9
    for row in rows:
        if row["status"] == "error":
            assert (row["text"], row["token_ids"], row["cycles"], row["num_output_tokens"]) == (None, None, None, 0)
            assert row["finish_reason"] == "error"
    assert by_key["r0", 0]["prompt"] == "<|system|>\nbe brief\n<|user|>\nhello 0\n<|assistant|>\n"
    assert by_key["r0", 0]["text"] != by_key["r0", 1]["text"]
    assert json.loads(by_key["r0", 0]["meta"]) == {"topic": "sea"}
    assert [by_key["params", s]["num_output_tokens"] for s in range(3)] == [2, 2, 2]
    assert [by_key[id, 0]["seed"] for id in ("params", "empty", "bad", "fails")] == [9, 9, 5, 5]
    parts = sorted((tmp_path / "out" / "rows").glob("*.parquet"))
    assert len(parts) > 2
    assert all(pq.read_schema(part).equals(SCHEMA) for part in parts)
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (run["status"], run["exit_code"], run["num_rows"], run["schema_version"]) == ("finished", 3, len(rows), 1)
    assert run["counts"]["errors"] == {
        "bad_record": 1, "empty_prompt": 2, "bad_params": 1, "fake_error": 2, "template_error": 2, "prompt_too_long": 1,
    }  # fmt: skip
    assert run["config"]["sampling"]["n"] == 2
    assert run["engine"] == {
        "method": "rheo", "tree_size": 60, "depth": 8, "top_k": 10, "m": 1, "dtype": "none", "device": "cpu", "attention": "none",
        "max_batch": 16, "max_model_len": 500, "draft_trained_length": None, "threads": run["engine"]["threads"],
    }  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [".lock", "ray.log", "rows", "run.json"]
    out = capsys.readouterr().out
    assert "empty_prompt: 2" in out
    assert "engine       rheo (tree_size 60, depth 8, top_k 10, m 1), none on cpu, max_batch 16, threads " in out
    assert "tau" in read_report(str(tmp_path / "out"))


def test_a_job_of_errors_only_has_the_same_schema(run_fake, tmp_path):
    code, rows = run_fake([{"prompt": ""}, "{", {"prompt": None}])
    assert code == 4
    assert [row["error_type"] for row in rows] == ["empty_prompt", "bad_record", "bad_record"]
    (part,) = (tmp_path / "out" / "rows").glob("*.parquet")
    assert pq.read_schema(part).equals(SCHEMA)


def test_rows_do_not_depend_on_batch_workers_or_chunks(tmp_path, make_config, ray_session):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"hello {i}"} for i in range(30)])
    texts = []
    for number, options in enumerate((["engine.max_batch=2"], ["engine.max_batch=32", "ray.workers=2", "output.rows_per_file=5"])):
        out = tmp_path / f"out{number}"
        assert run_job(make_config(source, f"output.path={out}", *options)) == 0
        texts.append([(row["id"], row["row_index"], row["text"]) for row in read_rows(out)])
    assert texts[0] == texts[1]


def test_a_long_row_holds_up_only_its_neighbours(run_fake, tmp_path):
    records = [{"prompt": f"hello {i}"} for i in range(120)]
    records[4] = {"prompt": "[[fake:slow=6]]"}
    code, rows = run_fake(records, "engine.max_batch=8", "output.rows_per_file=8")
    assert code == 0
    assert len(rows) == 120
    parts = {part: part.stat().st_mtime for part in (tmp_path / "out" / "rows").glob("*.parquet")}
    last = max(parts.values())
    early = sum(pq.read_metadata(part).num_rows for part, written in parts.items() if written < last - 2)
    assert early >= 120 - 16  # all but its own table, and perhaps the rest that waited for a whole part


def test_rows_that_kill_their_engine_become_error_rows(run_fake, tmp_path):
    records = [{"prompt": f"hello {i}"} for i in range(40)]
    records[7] = {"prompt": "[[fake:kill]]"}
    records[23] = {"prompt": "[[fake:raise]]", "params": {"seed": 9}}
    code, rows = run_fake(records, "engine.max_batch=4", "job.seed=5")
    assert code == 3
    assert [row["row_index"] for row in rows] == list(range(40))
    assert {row["row_index"]: row["error_type"] for row in rows if row["status"] == "error"} == {7: "engine_killed", 23: "engine_killed"}
    assert [rows[index]["seed"] for index in (7, 23)] == [5, 9]
    assert json.loads((tmp_path / "out" / "run.json").read_text())["engines"]["killed_rows"] == 2


def test_an_engine_that_cannot_be_loaded_ends_the_job(run_fake, tmp_path):
    with pytest.raises(EngineError, match="told not to load"):
        run_fake([{"prompt": "x"}], "model.target=fake-broken")
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (run["status"], run["exit_code"]) == ("failed", 5)


def test_a_job_whose_rows_all_kill_the_engine_ends(run_fake):
    with pytest.raises(EngineError, match=r"died 6 times in a row .* told to fail"):
        run_fake([{"prompt": "[[fake:raise]]"}] * 40, "engine.max_batch=4")


def test_parquet_input_and_messages(tmp_path, make_config, ray_session):
    messages = [[{"role": "user", "content": f"hi {i}"}] for i in range(10)] + [None]
    pq.write_table(pa.table({"id": range(11), "messages": messages}), tmp_path / "in.parquet", row_group_size=4)
    assert run_job(make_config(tmp_path / "in.parquet")) == 3
    rows = read_rows(tmp_path / "out")
    assert [row["id"] for row in rows] == [str(i) for i in range(11)]
    assert rows[2]["prompt"] == "<|user|>\nhi 2\n<|assistant|>\n"
    assert rows[10]["error_message"] == "in.parquet:11: messages is null"


def test_a_template_over_csv_makes_the_prompts(tmp_path, make_config, ray_session, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "docs.csv").write_text('id,title,document\n1,T,"two\nlines"\n2,,x\n3,T\n')
    job = ["input.template='{{ title }}: {{ document }}'", "output.rows_per_file=1"]
    assert run_job(make_config([str(folder), str(folder / "docs.csv")], *job)) == 3
    rows = read_rows(tmp_path / "out")
    assert [row["prompt"] for row in rows[:2]] == ["<|user|>\nT: two\nlines\n<|assistant|>\n", "<|user|>\n: x\n<|assistant|>\n"]
    assert [row["meta"] for row in rows] == [None] * 3
    assert rows[2]["error_message"] == "docs.csv:5: has 2 fields; allowed: 3, as the first row"
    for option in ("input.template='{{ document }}'", "input.template_kwargs={a: 1}", "input.truncate=left", "input.parse_special=true"):
        with pytest.raises(UserError, match=rf"it differs in {option.split('=')[0]} "):
            run_job(make_config([str(folder), str(folder / "docs.csv")], *job, option))


def test_raw_prompts(run_fake):
    code, rows = run_fake([{"prompt": "raw"}], "input.chat=false")
    assert (code, rows[0]["prompt"]) == (0, "raw")


def test_the_same_job_again_does_nothing_and_another_is_refused(run_fake, tmp_path, capsys):
    records = [{"prompt": "a"}, {"prompt": ""}]
    assert run_fake(records)[0] == 3
    (part,) = (tmp_path / "out" / "rows").glob("*.parquet")
    before = part.read_bytes()
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    from pipeline.config import load_config

    def again(*overrides):
        return run_job(load_config(str(tmp_path / "job.yaml"), overrides))

    assert again() == 3
    assert "finished already" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"sampling.temperature \(1.0 -> 0.5\)"):
        again("sampling.temperature=0.5")
    assert list((out / "rows").glob("*.parquet")) == [part]
    assert part.read_bytes() == before
    (out / "rows" / "mine.txt").write_text("keep")
    assert again("sampling.temperature=0.5", "output.overwrite=true") == 3
    assert len(read_rows(out)) == 2
    assert not part.exists()
    assert (out / "rows" / "mine.txt").exists()
    write_jsonl(source, [{"prompt": "b"}])
    with pytest.raises(UserError, match=r"in\.jsonl"):
        again("sampling.temperature=0.5")


def test_input_in_the_output_folder_is_refused(run_fake, tmp_path, make_config):
    assert run_fake([{"prompt": "a"}])[0] == 0
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for source in ("out/rows", "link/rows", "out/rows/*.parquet"):
        with pytest.raises(UserError, match=r"inside output\.path|will hold files that input\.path"):
            run_job(make_config(tmp_path / source, "input.prompt=text", "output.overwrite=true"))
    assert len(read_rows(tmp_path / "out")) == 1


@pytest.mark.parametrize("override", ["model.device=cuda", "model.target=fake-broken"])
def test_overwrite_keeps_the_earlier_rows_until_there_are_new_ones(run_fake, tmp_path, make_config, capsys, override):
    if override == "model.device=cuda" and ray.cluster_resources().get("GPU"):
        pytest.skip("needs a machine without a GPU")
    run_fake([{"prompt": "a"}])
    out = tmp_path / "out"
    before = {path: path.read_bytes() for path in [out / "run.json", *(out / "rows").iterdir()]}
    with pytest.raises((UserError, EngineError)):
        run_job(make_config(tmp_path / "in.jsonl", "output.overwrite=true", override))
    assert "held is there as before" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in [out / "run.json", *(out / "rows").iterdir()]} == before
    assert sorted(path.name for path in out.iterdir()) == [".lock", "ray.log", "rows", "run.json"]
    assert run_job(make_config(tmp_path / "in.jsonl")) == 0  # finished already


@pytest.mark.parametrize(
    ("error", "closed"),
    [(OSError("disk full"), ("failed", 5)), (KeyboardInterrupt(), ("interrupted", 130)), (EngineError("x"), ("failed", 5))],
)
def test_run_json_is_closed_whatever_happens(tmp_path, make_config, monkeypatch, error, closed):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(run_module, "_generate", fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else EngineError):
        run_job(make_config(write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])))
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (run["status"], run["exit_code"]) == closed


def test_a_ledger_that_cannot_be_asked_at_the_end_costs_only_its_counts(tmp_path, make_config, monkeypatch):
    monkeypatch.setattr(run_module, "execute", lambda *arguments: Outcome(2, None))
    assert run_job(make_config(write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}]))) == 130
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (run["status"], run["exit_code"]) == ("interrupted", 130)
    assert "engines" not in run
