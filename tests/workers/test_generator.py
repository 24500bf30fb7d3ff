"""The generator without an actor around it: in this process, with a real ledger beside it."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from engine.params import Request, SamplingParams, Speculation
from workers.generator import EngineSettings, Generator
from workers.ledger import Ledger

SETTINGS = EngineSettings(
    kind="fake", target="fake", draft="auto", revision=None, dtype="auto", device="auto", attention="auto", speculation=Speculation(),
    max_batch=4, max_model_len=None, kv_cache_gib="auto", reproducible=False, seed=0, threads=1,
)  # fmt: skip
NOBODY = None  # the id of the actor that this process is not
LONG = "[[fake:slow=600]]"


@pytest.fixture(scope="module")
def ray_here():
    """The Ray that the pipeline's tests have left running, or one for this file."""
    if ray.is_initialized():
        yield
        return
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def ledger(ray_here):
    return ray.remote(Ledger).options(num_cpus=0).remote()


def generate(generator, prompts):
    """Results by row number."""
    requests = [Request(id=str(index), prompt=prompt, params=SamplingParams()) for index, prompt in prompts.items()]
    return dict(zip(prompts, generator.generate(requests, [(index, 0) for index in prompts]), strict=True))


def count_open(generator):
    return len(generator._thread._open)


def test_rows_that_outrun_the_grace_are_given_up_and_the_others_come_back(ledger):
    generator = Generator(SETTINGS, ledger)
    with ThreadPoolExecutor(2) as pool:
        mixed = pool.submit(generate, generator, {0: "a", 1: LONG, 2: "b", 3: "[[fake:slow=2]]"})
        while count_open(generator) != 2:  # the long one, and the one that ends within the grace
            time.sleep(0.01)
        started = time.monotonic()
        ray.get(ledger.stop.remote(4))
        assert generate(generator, {4: "late"}) == {4: None}
        results = mixed.result(timeout=30)
    assert time.monotonic() - started > 3
    assert [index for index, result in results.items() if result is not None] == [0, 2, 3]


def test_suspects_are_stopped_too(ledger):
    """One runs alone, one waits for that, and a call of other rows waits behind both."""
    ray.get([ledger.start.remote(NOBODY), ledger.begin.remote(NOBODY, [(0, 0), (1, 0)])])
    generator = Generator(SETTINGS, ledger)  # a second start: the two were in the engine that died
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(generate, generator, {0: LONG, 5: "a"})
        while count_open(generator) != 1:
            time.sleep(0.01)
        second = pool.submit(generate, generator, {1: LONG, 6: "b"})
        third = pool.submit(generate, generator, {7: "c"})
        ray.get(ledger.stop.remote(1))
        results = [call.result(timeout=30) for call in (first, second, third)]
    assert results[0][0] is None
    assert results[0][5].text  # it ran before the suspect of its call
    assert results[1:] == [{1: None, 6: None}, {7: None}]
    state = ray.get(ledger.read.remote())
    assert (state["num_condemned"], state["totals"]["rows"]) == (0, 1)
