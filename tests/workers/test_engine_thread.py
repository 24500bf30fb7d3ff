import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import EngineError
from engine.fake import FakeEngine
from engine.params import Request, SamplingParams, Speculation
from workers.engine_thread import EngineThread


def fake(**options):
    return FakeEngine.load("fake", **options)


def request(id, prompt="hello", **params):
    return Request(id=id, prompt=prompt, params=SamplingParams(**params))


def test_concurrent_calls_share_the_engine():
    thread = EngineThread(fake(max_batch=8))
    with ThreadPoolExecutor(4) as pool:
        calls = [[request(f"{call}-{i}", "[[fake:tokens=30]]") for i in range(2)] for call in range(4)]
        answers = list(pool.map(thread.generate, calls))
    assert [[result.id for result in answer] for answer in answers] == [[r.id for r in call] for call in calls]
    thread.close()


def test_slots_refill_while_a_long_row_runs():
    """200 short rows go past one long row: steps come near max(longest, sum / slots), not to one batch after another."""
    engine = fake(max_batch=4, speculation=Speculation(method="off"))
    steps = []
    step = engine.step
    engine.step = lambda: steps.append(engine.num_running) or step()
    thread = EngineThread(engine)
    long = request("long", "[[fake:tokens=600]]", max_tokens=600)
    short = [request(f"s{i}", "[[fake:tokens=9]]") for i in range(200)]
    results = thread.generate([long, *short])
    thread.close()
    assert [result.id for result in results] == ["long", *(r.id for r in short)]
    assert len(steps) <= 650
    assert {cycle.batch_size for cycle in results[0].cycles[:500]} == {4}


def test_one_bad_request_does_not_disturb_the_others():
    thread = EngineThread(fake(max_batch=4))
    prompts = ["a", "[[fake:row_error]]", "b"]
    results = thread.generate([request(str(i), prompt) for i, prompt in enumerate(prompts)])
    alone = [EngineThread(fake(max_batch=1)).generate([request(str(i), prompts[i])])[0] for i in (0, 2)]
    assert [result.error and result.error.type for result in results] == [None, "fake_error", None]
    assert [results[0].token_ids, results[2].token_ids] == [result.token_ids for result in alone]


def test_an_engine_failure_reaches_every_caller():
    told = []
    thread = EngineThread(fake(max_batch=2), on_failure=told.append)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(thread.generate, [request(f"w{i}", "[[fake:slow=60]]")]) for i in range(2)]
        while not thread._open:
            time.sleep(0.01)
        waiting.append(pool.submit(thread.generate, [request("bad", "[[fake:raise]]")]))
        time.sleep(0.1)
        thread._engine.max_batch = 3
        for call in waiting:
            with pytest.raises(EngineError, match="told to fail"):
                call.result(timeout=10)
    with pytest.raises(EngineError, match="told to fail"):
        thread.generate([request("late")])
    assert len(told) == 1


def test_an_engine_that_loses_a_row_fails_loudly():
    engine = fake(max_batch=2)
    engine.step = lambda: engine._queue.clear() or []
    with pytest.raises(EngineError, match="1 requests have no result"):
        EngineThread(engine).generate([request("a")])


def test_dropped_requests_come_back_as_none():
    thread = EngineThread(fake(max_batch=1))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(thread.generate, [request(str(i), "[[fake:slow=0.2]]") for i in range(30)])
        while not thread._open:
            time.sleep(0.01)
        thread.drop_waiting()
        results = call.result(timeout=20)
    assert results[0] is not None
    assert results[-1] is None
    assert 1 <= sum(result is not None for result in results) <= 10


def test_progress_is_told_and_complete_when_idle():
    told, idle = [], threading.Event()
    thread = EngineThread(fake(), on_progress=lambda totals: (told.append(totals), totals.get("rows") == 3 and idle.set()))
    results = thread.generate([request("a"), request("b", "[[fake:row_error]]"), request("c")])
    assert idle.wait(10)
    assert told[-1]["errors"] == 1
    assert told[-1]["tokens"] == sum(len(result.token_ids or ()) for result in results)
