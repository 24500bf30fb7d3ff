import dataclasses
import json

import pytest

from engine.errors import UserError
from engine.params import SamplingParams, Speculation, Verification
from pipeline.checks import check_config, check_model, check_places
from pipeline.config import JobConfig, SamplingSection, SpeculationSection, VerificationSection, load_config
from pipeline.config_file import option_names
from pipeline.models import fetch_models
from tests.tiny_models import save_sentencepiece, tiny_llama

# A new option is a conscious change: it is added here too.
_TEXT = """
job.name job.seed
input.path input.format input.prompt input.messages input.id input.chat input.template input.template_kwargs input.system input.params
input.truncate input.parse_special input.limit input.max_errors input.grow input.storage_options
model.target model.draft model.dtype model.device model.attention model.revision model.max_model_len
sampling.temperature sampling.top_p sampling.top_k sampling.min_p sampling.eta sampling.repetition_penalty sampling.logit_bias
sampling.max_tokens sampling.min_tokens sampling.stop sampling.stop_token_ids sampling.ignore_eos sampling.n sampling.seed
sampling.logprobs
speculation.method speculation.tree_size speculation.depth speculation.top_k speculation.m speculation.draft_top
speculation.topology
speculation.verification.rule speculation.verification.order speculation.budget
engine.kind engine.max_batch engine.kv_cache_gib engine.reproducible
ray.address ray.workers ray.threads_per_worker ray.gpus_per_worker
output.path output.rows_per_file output.storage_options output.overwrite output.retry_errors
"""
OPTIONS = _TEXT.split()


@pytest.fixture
def load(tmp_path):
    def load(*overrides: str, text: str = "input: {path: in}\noutput: {path: out}\n"):
        path = tmp_path / "nightly.yaml"
        path.write_text(text)
        return load_config(str(path), overrides)

    return load


def test_the_list_of_options_is_frozen():
    assert option_names(JobConfig) == OPTIONS


@pytest.mark.parametrize(
    ("section", "params", "extra"),
    [(SamplingSection, SamplingParams, {"n"}), (SpeculationSection, Speculation, set()), (VerificationSection, Verification, set())],
)
def test_sections_are_the_engine_s_classes(section, params, extra):
    names = {f.name for f in dataclasses.fields(section)}
    assert names - extra == {f.name for f in dataclasses.fields(params)}


def test_defaults_are_the_engine_s_defaults(load):
    config = load()
    assert config.sampling.to_params() == SamplingParams()
    assert config.speculation.to_speculation() == Speculation()
    assert config.job.name == "nightly"


def test_overrides_go_over_the_file(load):
    config = load("sampling.n=4", "sampling.stop=[a, b]", "sampling.logit_bias={5: -1.5}", "speculation.verification.order=x")
    assert config.sampling.n == 4
    assert config.sampling.to_params().stop == ["a", "b"]
    assert config.sampling.to_params().logit_bias == {5: -1.5}
    assert config.speculation.to_speculation().verification.order == "x"


@pytest.mark.parametrize("section", ["", "speculation: {method: off}\n", "speculation: {method: 'off'}\n"])
def test_the_method_off_needs_no_quotes(load, section):
    overrides = [] if section else ["speculation.method=off"]
    assert load(*overrides, text="input: {path: in}\noutput: {path: out}\n" + section).speculation.method == "off"


def test_an_empty_section_is_a_section_of_defaults(load):
    assert load(text="input: {path: in}\noutput: {path: out}\nsampling:\n").sampling == SamplingSection()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.temprature=1", "did you mean 'temperature'"),
        ("samplin.n=1", "did you mean 'sampling'"),
        ("temperature=1", "'sampling.temperature' is an option"),
        ("speculation.verification.rul=x", "did you mean 'rule'"),
        ("sampling.max_tokens=many", "sampling.max_tokens='many'; allowed: an integer"),
        ("sampling.temperature=hot", "sampling.temperature='hot'; allowed: a number"),
        ("sampling.ignore_eos=perhaps", "allowed: true or false"),
        ("sampling=3", "sampling=3; allowed: a map"),
        ("sampling.n", "allowed: key=value"),
        ("input.system='${nowhere}'", "nowhere"),
        ("sampling.stop=[1", "is not valid YAML"),
    ],
)
def test_what_is_no_option_is_refused_with_what_is(load, override, message):
    with pytest.raises(UserError, match=message.replace("[", r"\[").replace("$", r"\$")):
        load(override)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "not valid YAML"), ("- a\n", "allowed: a map"), ("input: {path: in}\n", "output.path is required")],
)
def test_a_file_that_is_no_job_is_refused(load, text, message):
    with pytest.raises(UserError, match=message):
        load(text=text)


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "nightly.yaml").write_text("")
    with pytest.raises(UserError, match=r"did you mean '.*nightly.yaml'"):
        load_config(str(tmp_path / "nigthly.yaml"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("input.max_errors=-1", "input.max_errors=-1; allowed: a number of rows, a share of them below 1, or null"),
        ("input.max_errors=1.5", "input.max_errors=1.5; allowed"),
        ("input.max_errors=.inf", "input.max_errors=inf; allowed"),
        ("input.max_errors=1.0e+400", "input.max_errors=inf; allowed"),
        ("input.max_errors=.nan", "input.max_errors=nan; allowed"),
        ("input.max_errors=many", "input.max_errors='many'; allowed"),
        ("input.storage_options={key: secret}", "input.storage_options.key: credentials do not belong into a job file"),
        ("output.storage_options={url: x}", r"option in 'output.storage_options' 'url' .allowed: endpoint_url, "),
        (
            "output.path=gs://bucket/x",
            "output.path='gs://bucket/x' is on a store that is not built yet; allowed: a local path, s3://bucket/name",
        ),
        ("input.path='s3a://KEY:SECRET@bucket/in'", "input.path='s3a://...@bucket/in' is on a store that is not built yet"),
        ("input.path=['https://me:SECRET@host/in', 5]", r"input.path=\['https://...@host/in', 5\]; allowed: a path, or a list"),
        ("output.path=s3://", "output.path: no bucket"),
        ("output.path='s3://me:secret@bucket/x'", "output.path: no bucket, or credentials"),
        ("ray.gpus_per_worker=0.5", "not built yet"),
        ("model.attention=flash", "not built yet"),
        ("speculation.budget=most", "allowed: fixed, auto"),
        ("speculation.topology=tree.json", "speculation.topology='tree.json'; allowed: auto with method=rheo"),
        ("input.format=jsnl", "did you mean 'jsonl'"),
        ("input.truncate=lef", "did you mean 'left'"),
        ("input.path=5", "input.path=5; allowed: a path, or a list of paths"),
        ("input.path=[]", r"input.path=\[\]; allowed: a path, or a list of paths"),
        ("input.path=[a, 5]", "allowed: a path, or a list of paths"),
        ("input.path=[a, '']", "input.path is empty"),
        ("input.path=[a, 'http://b/c']", "input.path='http://b/c' is on a store that is not built yet"),
        ("input.template='{{ a'", "input.template, line 1: unexpected end of template"),
        ("input.template='{a}'", "input.template='{a}' reads no column"),
        ("input.chat=maybe", "allowed: auto, true, false"),
        ("input.limit=0", "allowed: an integer >= 1"),
        ("sampling.temperature=-1", "sampling.temperature=-1.0; allowed: a number >= 0"),
        ("sampling.n=0", "sampling.n=0; allowed"),
        ("job.seed=9223372036854775808", "job.seed=9223372036854775808; allowed: a 64-bit integer"),
        ("model.max_model_len=1", "model.max_model_len=1; allowed: an integer >= 2, or null"),
        ("sampling.logit_bias={1.5: 3}", "logit_bias has a key that is no token id"),
        ("sampling.stop=[1]", "sampling.stop"),
        ("engine.max_batch=0", "allowed: auto, or an integer >= 1"),
        ("engine.kv_cache_gib=-1", "allowed: auto, or a finite number > 0"),
        ("ray.workers=two", "allowed: auto, or an integer >= 1"),
        ("output.rows_per_file=0", "allowed: an integer >= 1, or null"),
    ],
)
def test_values_are_refused_with_what_is_allowed(load, override, message):
    with pytest.raises(UserError, match=message):
        check_config(load(override))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["output.path=null"], "output.path=null; allowed: text"),
        (["sampling.n=two", "sampling.n=null"], "sampling.n=null; allowed: an integer"),
        (["sampling.n=null", "sampling.n=two"], "sampling.n='two'; allowed: an integer"),
    ],
)
def test_a_refused_value_is_the_last_that_was_given(load, overrides, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        load(*overrides)


def test_only_the_last_value_of_an_option_counts(load):
    assert load("output.path=null", "output.path=other").output.path == "other"
    assert load("input.template_kwargs={a: 1}", "input.template_kwargs.b=2").input.template_kwargs == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("path", "output", "is_refused"),
    [
        ("in/**", "in/out", True),
        ("in/*", "in/out", True),
        ("in/*/*", "in/out", True),
        ("in/*/rows", "{here}/in/out", True),
        ("{here}/in/**/*.parquet", "in/out", True),
        ("in/**/*.json", "in/out", True),
        (["other", "in/o[tu]*/**"], "in/out", True),
        ("link/**", "in/out", True),
        ("in/**", "out", False),
        ("in/*.parquet", "in/out", False),
        ("in/**/*.jsonl", "in/out", False),
        ("in/day-*", "in/out", False),
        ("in/**", "in/_out", False),  # hidden, so no input
        ("in/**", "in/.out/a", False),
        ("s3://bucket/in/**", "s3://bucket/in/out", True),
        ("s3://bucket/i*", "s3://bucket/in/out", True),
        ("s3://bucket/in/*/*/part*", "s3://bucket/in/out", True),
        ("s3://bucket/in/*.jsonl", "s3://bucket/in/out", False),
        ("s3://bucket/in/**", "s3://bucket/in/_out", False),
        ("s3://bucket/in/**", "s3://other/in/out", False),
        ("s3://bucket/in/**", "in/out", False),
        ("in/**", "s3://bucket/in/out", False),
    ],
)
def test_a_glob_that_matches_the_output_is_refused(load, tmp_path, monkeypatch, path, output, is_refused):
    """A job with its own rows among its input could not be resumed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to("in")
    paths = [entry.format(here=tmp_path) for entry in ([path] if isinstance(path, str) else path)]
    config = load(f"input.path={json.dumps(paths)}", f"output.path={output.format(here=tmp_path)}")
    if is_refused:
        with pytest.raises(UserError, match=r"output.path '.*/?in/out' will hold files that input.path '.*' matches; allowed: "):
            check_places(config)
    else:
        check_places(config)


def test_a_draft_is_refused_where_nothing_is_drafted(load):
    with pytest.raises(UserError, match=r"model.draft='head' with speculation.method=off"):
        check_config(load("model.draft=head", "speculation.method=off"))


@pytest.mark.parametrize("option", ["input.system=be brief", "input.template_kwargs={enable_thinking: false}"])
def test_what_needs_the_chat_template_is_refused_without_it(load, option):
    check_config(load(option))
    with pytest.raises(UserError, match=rf"{option.split('=')[0]} needs the chat template, and input.chat=false"):
        check_config(load(option, "input.chat=false"))


@pytest.mark.parametrize("option", ["input.system=be brief", "input.template_kwargs={enable_thinking: false}", "input.chat=true"])
def test_what_needs_the_chat_template_is_refused_for_a_target_without_one(load, tmp_path, option):
    target = tiny_llama(tmp_path / "target")
    config = load(option, f"model.target={target}", "model.draft=ngram")
    check_model(config)
    fetch_models(config)
    text = (target / "chat_template.jinja").read_text()
    save_sentencepiece(target, 400)  # as a Vicuna's, without a template
    for check in (check_model, fetch_models):
        check(load(f"model.target={target}", "model.draft=ngram"))
        with pytest.raises(UserError, match=rf"{option.split('=')[0]} needs a chat template, and the tokenizer in '{target}' has none"):
            check(config)
    tokenizer = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "chat_template": text}))
    check_model(config)


def test_a_prompt_is_made_in_one_way(load):
    template = "input.template='{{ document }}'"
    check_config(load(template))
    check_config(load(template, "input.prompt=null", "input.messages=null"))
    for option in ("input.prompt=text", "input.messages=chat.turns"):
        with pytest.raises(UserError, match=rf"{option.split('=')[0]}='.*' beside input.template"):
            check_config(load(template, option))
    with pytest.raises(UserError, match=r"both null; allowed: at least one column, or input\.template"):
        check_config(load("input.prompt=null", "input.messages=null"))


@pytest.mark.parametrize("options", [[], ["speculation.topology=tree.json"]])
def test_static_trees_are_a_method(load, options):
    check_config(load("speculation.method=static", *options))


def test_a_static_tree_larger_than_its_topology_is_refused_before_a_model_is_loaded(load, tmp_path):
    target, topology = tmp_path / "target", tmp_path / "tree.json"
    target.mkdir()
    sizes = {"hidden_size": 8, "vocab_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").touch()
    (target / "tokenizer.json").touch()
    topology.write_text(json.dumps({"paths": [[0], [1], [0, 0]]}))
    job = [f"model.target={target}", "model.draft=ngram", "speculation.method=static", f"speculation.topology={topology}"]
    check_model(load(*job, "speculation.tree_size=4"))
    with pytest.raises(UserError, match=r"ask for 59 drafted nodes; .*tree\.json' has 3"):
        check_model(load(*job))


def test_the_input_may_be_a_list(load):
    text = "input: {path: [a.jsonl, 'b/*.csv']}\noutput: {path: out}\n"
    for config in (load(text=text), load("input.path=[a.jsonl,b/*.csv]")):
        check_config(config)
        assert config.input.path == ["a.jsonl", "b/*.csv"]


def test_text_on_the_command_line_needs_no_quotes(load):
    config = load("input.template=Summarise this: {{ prompt }}", "input.system=be: brief", "input.system=- [x")
    assert config.input.template == "Summarise this: {{ prompt }}"
    assert config.input.system == "- [x"
    assert load("input.template={{ prompt }}").input.template == load("input.template='{{ prompt }}'").input.template == "{{ prompt }}"
    assert load("job.name=1e3").job.name == "1e3"
    assert load("input.system=null").input.system is None
    with pytest.raises(UserError, match=r"override 'sampling.stop=\[a: b: c' .*allowed: quotes around text"):
        load("sampling.stop=[a: b: c")
