"""What counts as another job, and how the difference is told."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import LlamaConfig

from engine.errors import UserError
from engine.models.presets import PRESETS
from pipeline import fingerprint as fingerprint_module
from pipeline.config import JobConfig
from pipeline.config_file import option_names
from pipeline.files import find_files
from pipeline.fingerprint import ROWS_VERSION, describe_job, describe_models, find_difference
from pipeline.models import Models, fetch_models
from tests.engine.real_pair import needs_real_pair
from tests.pipeline.conftest import write_jsonl
from tests.tiny_models import tiny_eagle3, tiny_llama

PRESET = PRESETS["smollm2-135m-instruct"]

#: option -> another value, which makes another job
CHANGES = {
    "job.seed": 1,
    "input.format": "text",
    "input.prompt": "question",
    "input.messages": "turns",
    "input.id": "key",
    "input.chat": False,
    "input.template": "{{ a }}",
    "input.template_kwargs": {"a": 1},
    "input.system": "Be brief.",
    "input.params": None,
    "input.truncate": "left",
    "input.parse_special": True,
    "input.limit": 1,
    "model.dtype": "float32",
    "model.max_model_len": 100,
    "sampling.temperature": 0.7,
    "sampling.top_p": 0.9,
    "sampling.top_k": 5,
    "sampling.min_p": 0.1,
    "sampling.eta": 0.1,
    "sampling.repetition_penalty": 1.1,
    "sampling.logit_bias": {5: -1},
    "sampling.max_tokens": 100,
    "sampling.min_tokens": 2,
    "sampling.stop": ["\n"],
    "sampling.stop_token_ids": [7],
    "sampling.ignore_eos": True,
    "sampling.n": 2,
    "sampling.seed": 0,
    "sampling.logprobs": True,
    "speculation.method": "topk",
    "speculation.tree_size": 9,
    "speculation.depth": 4,
    "speculation.top_k": 9,
    "speculation.m": 2,
    "speculation.draft_top": 64,
    "speculation.topology": "other.json",
    "speculation.verification.rule": "other",
    "speculation.verification.order": "deterministic_first",
    "engine.kind": "fake",
    "engine.reproducible": True,
}

#: option -> another value, which makes no other job
FREE = {
    "job.name": "other",
    "input.path": ["{folder}"],
    "input.max_errors": 3,
    "input.grow": True,
    "input.storage_options": {"endpoint_url": "http://127.0.0.1:1"},
    "model.device": "cpu",
    "model.attention": "sdpa",
    "speculation.budget": "auto",
    "engine.max_batch": 3,
    "engine.kv_cache_gib": 1.5,
    "ray.address": "other",
    "ray.workers": 2,
    "ray.threads_per_worker": 1,
    "ray.gpus_per_worker": 0.5,
    "output.path": "elsewhere",
    "output.rows_per_file": 10,
    "output.storage_options": {"endpoint_url": "http://127.0.0.1:1"},
    "output.overwrite": True,
    "output.retry_errors": True,
}

#: in the fingerprint by what they stand for
OF_MODELS = ("model.target", "model.draft", "model.revision")


@pytest.fixture
def describe(tmp_path, monkeypatch, make_config):
    """The fingerprint of a job over in/a.jsonl, with options over it."""
    (tmp_path / "in").mkdir()
    source = write_jsonl(tmp_path / "in" / "a.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    monkeypatch.chdir(tmp_path)
    shutil.copy(PRESET.topology, "copy.json")
    (tmp_path / "other.json").write_text(PRESET.topology.read_text() + "\n")

    def describe(*overrides: str, **options) -> dict:
        set_here = [f"{option}={json.dumps(value)}" for option, value in options.items()]
        config = make_config(source, "engine.kind=real", *overrides, *set_here)
        return describe_job(config, find_files(config.input.path, config.input.format)[0])

    return describe


def test_every_option_is_in_the_fingerprint_or_free():
    """A new option is put into one of these lists, and tested there."""
    named = [*CHANGES, *FREE, *OF_MODELS]
    assert sorted(named) == sorted(option_names(JobConfig))


@pytest.mark.parametrize("option", CHANGES)
def test_an_option_that_can_change_rows_makes_another_job(describe, option):
    base = ["speculation.tree_size=8", "speculation.depth=3"] + (["speculation.method=static"] if option == "speculation.topology" else [])
    name = "input.files" if option == "input.format" else option
    before, now = describe(*base), describe(*base, **{option: CHANGES[option]})
    assert before.keys() == now.keys()
    assert [other for other in before if before[other] != now[other]] == [name]
    difference = find_difference(before, now, grow=False)
    assert difference.startswith(f"{name} (") and "more field" not in difference


@pytest.mark.parametrize("option", FREE)
def test_an_option_that_cannot_change_rows_is_free(describe, tmp_path, option):
    value = [str(tmp_path / "in")] if option == "input.path" else FREE[option]
    assert describe() == describe(**{option: value})


def test_models_are_described_apart(describe):
    assert not set(OF_MODELS) & set(describe())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["speculation.method=static"], ["speculation.method=static", "speculation.topology=copy.json"]),
        (["sampling.stop=x"], ["sampling.stop=[x]"]),
        ([], ["sampling.stop=[]", "sampling.logit_bias={}", "sampling.stop_token_ids=[]"]),
        (["sampling.logit_bias={5: 1, 10: 2}"], ["sampling.logit_bias={'10': 2.0, '5': 1.0}"]),
        (["sampling.temperature=1"], ["sampling.temperature=1.0"]),
        (["input.template_kwargs={a: 1, b: 2}"], ["input.template_kwargs={b: 2, a: 1}"]),
        ([], ["input.format=jsonl"]),
    ],
)
def test_two_ways_to_say_one_thing_are_one_job(describe, one, other):
    assert find_difference(describe(*one), describe(*other), grow=False) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("input.template_kwargs={thinking: true}", "input.template_kwargs={thinking: 1}"),
        ("input.template_kwargs={tools: [{a: 1, b: 2}]}", "input.template_kwargs={tools: [{b: 2, a: 1}]}"),
    ],
)
def test_what_a_template_can_tell_apart_is_another_job(describe, one, other):
    assert find_difference(describe(one), describe(other), grow=False).startswith("input.template_kwargs (")


def test_it_comes_back_from_json(describe):
    fingerprint = describe("sampling.logit_bias={5: 1, 10: 2.5}", "sampling.stop=[a, é]", "input.template_kwargs={a: {1: [x, null]}}")
    assert json.loads(json.dumps(fingerprint, allow_nan=False)) == fingerprint
    assert list(json.loads(json.dumps(fingerprint))) == list(fingerprint)
    assert fingerprint["rows_version"] == ROWS_VERSION


def test_what_json_cannot_hold_is_refused(describe):
    with pytest.raises(UserError, match=r"input.template_kwargs=\{'a': nan\} has what JSON cannot hold"):
        describe("input.template_kwargs={a: .nan}")


def test_a_topology_that_is_missing_is_refused(describe):
    with pytest.raises(UserError, match=r"speculation\.topology='no\.json' is no file"):
        describe("speculation.method=static", "speculation.topology=no.json")


def test_the_input_is_its_bytes_under_its_names(describe, tmp_path):
    before = describe()
    assert [name for name, _ in before["input.files"]] == ["a.jsonl"]
    shutil.copytree(tmp_path / "in", tmp_path / "moved")
    assert describe(**{"input.path": "moved"}) == before
    write_jsonl(tmp_path / "in" / "a.jsonl", [{"prompt": "one"}, {"prompt": "twö"}])
    difference = find_difference(before, describe(), grow=True)
    assert difference.startswith("input.files ('a.jsonl' is changed: ")


# ---- what is told ----


def told(change: dict, *, before: dict | None = None, grow: bool = False, without: tuple = ()) -> str | None:
    """The difference between a small fingerprint and the same with `change`."""
    base = {
        "job.seed": 0,
        "input.template": None,
        "sampling.temperature": 0.7,
        "sampling.logit_bias": {},
        "input.files": [["a.jsonl", "sha256 " + "a" * 64], ["b.jsonl", "sha256 " + "b" * 64]],
        "rows_version": 1,
        "model.target": "sha256 " + "12ab34cd" * 8,
        "model.draft": "ngram",
    }
    before = {**base, **(before or {})}
    now = {name: value for name, value in {**before, **change}.items() if name not in without}
    return find_difference(json.loads(json.dumps(before)), now, grow=grow)


A, B = ["a.jsonl", "sha256 " + "a" * 64], ["b.jsonl", "sha256 " + "b" * 64]
C, D = ["c.jsonl", "sha256 " + "c" * 64], ["d.jsonl", "sha256 " + "d" * 64]
OTHER_B = ["b.jsonl", "sha256 " + "e" * 64]
TEXT = "Summarise the following document in one sentence, and mind the names:\n\n{{ document }}\n\nNot more than "


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"sampling.temperature": 1.0}, "sampling.temperature (0.7 -> 1.0)"),
        ({"input.template": "{{ a }}\n\x1b[2J"}, r'input.template (null -> "{{ a }}\n\u001b[2J")'),
        ({"sampling.logit_bias": {"5": 1.0}}, 'sampling.logit_bias ({} -> {"5": 1.0})'),
        ({"model.target": "sha256 " + "56cd78ef" * 8}, "model.target (sha256 12ab34cd.. -> sha256 56cd78ef..)"),
        ({"model.draft": None}, "model.draft (ngram -> null)"),
        ({"rows_version": 2}, "rows_version (1 -> 2: another version of rheo wrote the rows)"),
        (
            {
                "model.draft": "auto",
                "job.seed": 1,
                "input.template": "x",
                "sampling.temperature": 0.0,
                "rows_version": 2,
                "input.files": [],
            },
            "sampling.temperature (0.7 -> 0.0) and 5 more fields (input.template, job.seed, input.files, model.draft, ...)",
        ),
        ({"job.seed": 1, "model.draft": "auto"}, "job.seed (0 -> 1) and 1 more field (model.draft)"),
        ({"sampling.new": 3}, "sampling.new (not known to the version of rheo that wrote the rows -> 3)"),
        (
            {"sampling.new": 3, "rows_version": 2},
            "rows_version (1 -> 2: another version of rheo wrote the rows) and 1 more field (sampling.new)",
        ),
    ],
)
def test_the_first_difference_is_told_with_both_values(change, expected):
    assert told(change) == expected


def test_an_option_that_is_gone_is_told():
    assert told({}, without=("job.seed",)) == "job.seed (0 -> not known to this version of rheo)"


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (TEXT + "20 words.", TEXT + "30 words.", r'(...\nNot more than 20 words." -> ...\nNot more than 30 words.")'),
        ("x" * 100, "x" * 100 + "y", '(...xxxxxxxxxxxxxxxx" -> ...xxxxxxxxxxxxxxxxy")'),
        (
            "A" + TEXT,
            "B" + TEXT,
            '("ASummarise the following document in one senten... -> "BSummarise the following document in one senten...)',
        ),
        ("", TEXT, '("" -> "Summarise the following document in one sentenc...)'),
        (TEXT + "'", TEXT + '"', r"""(...\nNot more than '" -> ...\nNot more than \"")"""),
    ],
)
def test_of_long_values_the_place_is_shown_where_they_differ(before, now, expected):
    assert told({"input.template": now}, before={"input.template": before}) == f"input.template {expected}"


@pytest.mark.parametrize(
    ("files", "grow", "expected"),
    [
        ([A, B], True, None),
        ([A, B, C], True, None),
        ([A, B, C], False, "'c.jsonl' is new; allowed: input.grow=true"),
        ([A, B, C, D], False, "'c.jsonl' is new, and 1 more file; allowed: input.grow=true"),
        ([A], False, "'b.jsonl' is missing"),
        ([A], True, "'b.jsonl' is missing"),
        ([C, D], True, "'a.jsonl' is missing, and 1 more file"),
        ([A, OTHER_B], False, "'b.jsonl' is changed: sha256 bbbbbbbb.. -> sha256 eeeeeeee.."),
        ([A, OTHER_B, C], True, "'b.jsonl' is changed: sha256 bbbbbbbb.. -> sha256 eeeeeeee.."),
        ([["x/a.jsonl", A[1]], B], False, "'a.jsonl' is missing: 'x/a.jsonl' has its content"),
        ([B, A], False, "'b.jsonl' is in the place of 'a.jsonl'"),
        ([B, A, C], True, "'b.jsonl' is in the place of 'a.jsonl'"),
        ([A, C, B], True, "'c.jsonl' is in the place of 'b.jsonl'"),
        ([A, ["b.jsonl", "text, " + B[1]]], True, "'b.jsonl' is changed: sha256 bbbbbbbb.. -> text, sha256 bbbbbbbb.."),
    ],
)
def test_of_the_files_the_first_that_differs_is_told(files, grow, expected):
    assert told({"input.files": files}, grow=grow) == (expected and f"input.files ({expected})")


@pytest.mark.parametrize("format", ["", "text, "])
def test_contents_on_a_disk_and_in_a_store_are_not_said_to_differ(format):
    disk, store = f"{format}sha256:{'a' * 64}", f"{format}etag:{'b' * 32}:21"
    cannot = "'a.jsonl' is on another kind of store, and contents cannot be compared between a disk and S3"
    difference = told({"input.files": [["a.jsonl", store]]}, before={"input.files": [["a.jsonl", disk]]})
    assert difference == f"input.files ({cannot}: {format}sha256:aaaaaaaa.. -> {format}etag:bbbbbbbb..:21)"
    difference = told({"input.files": [["a.jsonl", disk], B]}, before={"input.files": [["a.jsonl", store], B]}, grow=True)
    assert difference.startswith(f"input.files ({cannot}: ")


# ---- models ----


@pytest.fixture
def real_config(tmp_path, make_config):
    """A job on a tiny target and its head, in folders of their own."""
    target = tiny_llama(tmp_path / "target")
    tiny_eagle3(tmp_path / "draft", LlamaConfig.from_pretrained(target))

    def make(*overrides: str):
        models = [f"model.target={tmp_path / 'target'}", f"model.draft={tmp_path / 'draft'}"]
        return make_config(tmp_path / "in.jsonl", "engine.kind=real", *models, *overrides)

    return make


def describe_fetched(config) -> dict:
    return describe_models(config, fetch_models(config))


def test_models_are_their_content(tmp_path, real_config):
    before = describe_fetched(real_config())
    assert before["model.target"].startswith("sha256 ") and before["model.draft"].startswith("sha256 ")
    shutil.copytree(tmp_path / "target", tmp_path / "moved")
    assert describe_fetched(real_config(f"model.target={tmp_path / 'moved'}")) == before
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    now = describe_fetched(real_config())
    assert now["model.draft"] == before["model.draft"]
    assert find_difference(before, now, grow=True).startswith("model.target (sha256 ")
    tiny_eagle3(tmp_path / "draft", LlamaConfig.from_pretrained(tmp_path / "target"), seed=1)
    assert find_difference(now, describe_fetched(real_config()), grow=True).startswith("model.draft (sha256 ")


def test_drafts_without_files(real_config):
    assert describe_fetched(real_config("model.draft=ngram"))["model.draft"] == "ngram"
    assert describe_fetched(real_config("model.draft=auto", "speculation.method=off"))["model.draft"] is None


def test_a_revision_is_the_commit_that_was_found(real_config, monkeypatch):
    """`engine.models.content` is tested with a hub; here, that it is asked for the commit of `Models`."""
    asked = []
    monkeypatch.setattr("engine.models.content.describe_target", lambda *names: asked.append(names) or "commit 1")
    describe_models(real_config("model.draft=ngram", "model.revision=main"), Models("org/target", "0123", "ngram"))
    assert asked == [("org/target", "0123")]


def test_the_fake_engine_has_names_only(make_config, tmp_path):
    described = describe_fetched(make_config(tmp_path / "in.jsonl", "model.target=any"))
    assert (described["model.target"], described["model.draft"]) == ("any", "auto")


@needs_real_pair
def test_a_tree_that_nobody_asked_for_is_the_target_s(describe, make_config, real_config, tmp_path):
    """So a change of the target, which changes it, is told as that."""
    source = tmp_path / "in.jsonl"

    def tree(config) -> tuple:
        whole = {**describe_job(config, []), **describe_fetched(config)}
        return whole["speculation.tree_size"], whole["speculation.depth"]

    size, depth = PRESET.tree_size, PRESET.depth
    assert tree(make_config(source, "engine.kind=real")) == (size, depth)
    assert tree(make_config(source, "engine.kind=real", f"speculation.tree_size={size}")) == (size, depth)
    assert tree(make_config(source, "engine.kind=real", "speculation.depth=2")) == (size, 2)
    assert tree(make_config(source)) == tree(real_config()) == (60, 8)
    before, now = (describe_fetched(config) for config in (make_config(source, "engine.kind=real"), real_config()))
    assert find_difference(before, now, grow=False).startswith("model.target (smollm2-135m-instruct, sha256 ")
    assert not {"speculation.tree_size", "speculation.depth"} & set(describe())


def test_free_options_of_the_code_are_those_tested_here():
    assert set(FREE) == fingerprint_module.FREE_OPTIONS
