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


def test_a_drop_answers_at_once_and_for_good():
    thread = EngineThread(fake(max_batch=1))
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(thread.generate, [request("long", "[[fake:slow=2]]")])
        while not thread._open:
            time.sleep(0.01)
        thread.drop_waiting()
        assert pool.submit(thread.generate, [request("late"), request("later")]).result(timeout=1) == [None, None]
        assert running.result(timeout=20)[0].id == "long"
    thread.close()


def test_abandoned_rows_are_none_and_finished_ones_of_the_same_call_are_not():
    """Some of the rows wait, some run; a call that comes later has no row at all."""
    engine = fake(max_batch=3)
    thread = EngineThread(engine)
    long = [request(f"long{i}", "[[fake:slow=600]]") for i in range(20)]
    with ThreadPoolExecutor(2) as pool:
        mixed = pool.submit(thread.generate, [request("short"), *long[:2], request("bad", "[[fake:row_error]]")])
        while thread._totals["rows"] < 2:
            time.sleep(0.01)
        waiting = pool.submit(thread.generate, long[2:])
        while len(thread._open) < 11:  # the slots, and what waits in the engine
            time.sleep(0.01)
        thread.abandon()
        assert [result and result.id for result in mixed.result(timeout=5)] == ["short", None, None, "bad"]
        assert waiting.result(timeout=5) == [None] * 18
    assert thread.generate([request("late")]) == [None]
    thread._thread.join(timeout=5)
    assert not thread._thread.is_alive()
    assert engine.has_work  # given up, not finished


def test_a_hung_step_does_not_hold_up_the_calls_once_abandoned():
    engine, hung, go_on, steps = fake(max_batch=2), threading.Event(), threading.Event(), []
    step = engine.step

    def hang():
        steps.append(1)
        if engine.num_running:
            hung.set()
            assert go_on.wait(20)
        return step()

    engine.step = hang
    thread = EngineThread(engine)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(thread.generate, [request("short", "[[fake:tokens=2]]"), request("bad", "[[fake:row_error]]")])
        assert hung.wait(10)
        thread.abandon()
        assert [result and result.id for result in call.result(timeout=5)] == [None, "bad"]
    num_steps = len(steps)
    go_on.set()  # the step comes back after all, with a row that nobody waits for
    thread._thread.join(timeout=10)
    assert not thread._thread.is_alive()
    assert len(steps) == num_steps


def test_an_idle_thread_is_abandoned_too():
    thread = EngineThread(fake())
    thread.generate([request("a")])
    thread.abandon()
    thread._thread.join(timeout=5)
    assert not thread._thread.is_alive()


def test_an_engine_that_fails_while_the_job_stops_does_not_cost_the_finished_rows():
    engine, told = fake(max_batch=4), []
    step = engine.step

    def fail_when_dropping():
        if thread._is_dropping:
            raise EngineError("out of memory")
        return step()

    thread = EngineThread(engine, on_failure=told.append)
    engine.step = fail_when_dropping
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(thread.generate, [request("short"), request("long", "[[fake:slow=600]]")])
        while not thread._totals["rows"]:
            time.sleep(0.01)
        thread.drop_waiting()
        assert [result and result.id for result in call.result(timeout=10)] == ["short", None]
    assert told == []


def test_the_first_row_is_told_at_once():
    told = threading.Event()
    thread = EngineThread(fake(), on_progress=lambda totals: totals["rows"] == 1 and told.set(), progress_s=600)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(thread.generate, [request("short"), request("long", "[[fake:slow=600]]")])
        assert told.wait(10)
        thread.abandon()
        call.result(timeout=5)


def test_progress_is_told_and_complete_when_idle():
    told, idle = [], threading.Event()
    thread = EngineThread(fake(), on_progress=lambda totals: (told.append(totals), totals.get("rows") == 3 and idle.set()))
    results = thread.generate([request("a"), request("b", "[[fake:row_error]]"), request("c")])
    assert idle.wait(10)
    assert told[-1]["errors"] == 1
    assert told[-1]["tokens"] == sum(len(result.token_ids or ()) for result in results)
