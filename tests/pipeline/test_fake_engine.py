import pytest

from engine.errors import EngineError
from engine.fake import FakeEngine
from engine.params import Request, SamplingParams, Speculation


def load(**options):
    return FakeEngine.load("fake", **options)


def test_text_depends_on_seed_id_sample_and_prompt_only():
    requests = [Request(id=f"r{i}", prompt=f"p{i % 3}", sample=s) for i in range(10) for s in range(2)]
    tokens = {(r.id, r.sample): r.token_ids for r in load(max_batch=3).generate(requests)}
    assert tokens == {(r.id, r.sample): r.token_ids for r in load(max_batch=16).generate(reversed(requests))}
    assert tokens != {(r.id, r.sample): r.token_ids for r in load(max_batch=3, seed=1).generate(requests)}
    assert len({tuple(t) for t in tokens.values()}) == len(tokens)


@pytest.mark.parametrize("method", ["rheo", "off"])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 100])
def test_cycles_add_up(method, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, logprobs=True)
    engine = load(speculation=Speculation(method=method, tree_size=6, depth=3))
    for result in engine.generate(Request(prompt=f"p{i}", params=params) for i in range(20)):
        assert len(result.token_ids) == 1 + sum(cycle.emitted for cycle in result.cycles) == len(result.logprobs)
        assert all(cycle.emitted <= cycle.accepted + 1 and cycle.accepted <= cycle.depth for cycle in result.cycles)
        assert (result.finish_reason == "length") == (result.token_ids[-1] != 0)
        assert result.finish_reason == "stop" or len(result.token_ids) == max_tokens


def test_bad_requests_come_back_as_errors():
    engine = load(max_model_len=10)
    prompts = ["ok", "[[fake:row_error]]", "long " * 10]
    errors = [r.error and r.error.type for r in engine.generate([Request(prompt=p) for p in prompts])]
    assert errors == [None, "fake_error", "prompt_too_long"]
    (result,) = engine.generate([Request(prompt="x", params=SamplingParams(top_p=2))])
    assert result.error.type == "bad_params"


def test_failures_on_command():
    with pytest.raises(EngineError):
        load().generate([Request(prompt="[[fake:raise]]")])
    with pytest.raises(EngineError):
        FakeEngine.load("fake-broken")
