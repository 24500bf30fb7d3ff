"""Other engines, in processes of their own: transformers, which is here, and scripts that stand for those which are not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine.errors import EngineError
from jobs.throughput import peer as peer_module
from jobs.throughput.cell import Cell
from jobs.throughput.peer import Peer
from jobs.throughput.run import run_bench

CELL = Cell(
    system="transformers",
    batch=2,
    method=None,
    tree_size=None,
    depth=None,
    m=None,
    temperature=1.0,
    prompt_tokens=None,
    output_tokens=5,
)
PROMPTS = [[1, 5, 6], [1, 7, 8, 9], [1, 4]]


def test_transformers_takes_part_in_the_rounds(load):
    config = load("grid.batch=[1,2]", "grid.method=[off]", "measure.repeats=1", "peers={transformers: this, transformers-assisted: this}")
    assert run_bench(config) == 0
    rows = pq.read_table(Path(config.output.path) / "measurements.parquet").to_pylist()
    assert {(row["batch"], row["system"]) for row in rows} == {
        *((1, name) for name in ("engine", "transformers", "transformers-assisted")),
        *((2, name) for name in ("engine", "transformers")),
    }
    assert {row["num_output_tokens"] for row in rows} == {2 * 12}
    versions = [dict(row["versions"]) for row in rows if row["system"] == "transformers"]
    assert all(version["transformers"] for version in versions)


@pytest.fixture
def start(models, tmp_path):
    peers = []

    def start(name: str, **setup) -> Peer:
        sections = {"target": str(models / "target"), "draft": None, "draft_kind": None, "dtype": "float32", "device": "cpu"}
        peers.append(Peer(name, sys.executable, {**sections, "num_threads": 1, "max_batch": 2, "seed": 0, **setup}, tmp_path / "log"))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


def test_assisted_generation_takes_a_language_model_as_its_draft(start, models):
    peer = start("transformers-assisted", draft=str(models / "target"), draft_kind="causal_lm")
    for temperature in (0.0, 0.8):
        cell = Cell(**{**vars(CELL), "system": "transformers-assisted", "batch": 1, "temperature": temperature})
        figures = peer.measure(cell, PROMPTS, 0)
        assert (figures.num_rows, figures.num_output_tokens, figures.num_prompt_tokens) == (3, 15, 9)
        assert figures.peak_memory_bytes > 2**20
    pid = peer._process.pid
    peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_peer_that_cannot_be_loaded_says_why(start):
    with pytest.raises(EngineError, match=r"the peer transformers \(.*\) failed: .*nowhere"):
        start("transformers", target="/nowhere").measure(CELL, PROMPTS, 0)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Makes a script stand for vLLM's."""

    def write(body: str) -> None:
        here = Path(peer_module.__file__).parent / "peers"
        (tmp_path / "vllm_generate.py").write_text(f"import sys\nsys.path.insert(0, {str(here)!r})\n{body}")
        monkeypatch.setattr(peer_module, "_FOLDER", tmp_path)

    return write


def test_a_peer_that_dies_leaves_its_last_words(start, script):
    script("import os\nfrom serving import serve\ndef load(setup):\n    print('no more memory')\n    os._exit(9)\nserve(load, [])\n")
    with pytest.raises(EngineError, match=r"the peer vllm \(.*\) has ended: no more memory"):
        start("vllm").measure(CELL, PROMPTS, 0)


def test_rows_of_another_length_are_an_error(start, script):
    script(
        "from serving import require_lengths, serve\n"
        "def load(setup):\n"
        "    return lambda request: {'seconds': 1.0, 'num_output_tokens': require_lengths([[1], [2, 3]], 2)}\n"
        "serve(load, [])\n"
    )
    with pytest.raises(EngineError, match="1 of 2 rows have other than 2 tokens; the first has 1"):
        start("vllm").measure(CELL, PROMPTS, 0)
