import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
import ray

from engine.params import SamplingParams, Speculation
from pipeline.config import InputSection
from pipeline.generate import GenerateRows, RowOptions
from pipeline.graph import prepare_context
from pipeline.ray_session import ray_session as ray_session_of_a_job
from pipeline.records import ROW_SCHEMA
from pipeline.stop import StopCallback, StopOverdue, handle_signals
from pipeline.watch import run_watched
from workers.generator import EngineSettings
from workers.ledger import Ledger

ROOT = Path(__file__).parents[2]

LISTENER = """
import ctypes, threading
from types import SimpleNamespace
from pipeline.stop import handle_signals
from workers.ledger import Ledger

ledger = Ledger()
with handle_signals() as stop, stop.telling(SimpleNamespace(stop=SimpleNamespace(remote=ledger.stop))):
    stop.ray_has_started()
    def tell():
        print("ready", flush=True)
        while not stop.requested:
            pass
        print("requested", stop.reason, ledger.phase(), flush=True)
    threading.Thread(target=tell).start()
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # for ever, in C, as in an upload that hangs; no signal interrupts it
"""


@pytest.fixture
def listener():
    """A process whose main thread is in C code and does not come back."""
    command = [sys.executable, "-c", LISTENER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_second_signal_ends_the_process_whatever_it_is_doing(listener):
    listener.send_signal(signal.SIGTERM)
    assert listener.stdout.readline() == f"requested {signal.SIGTERM.value} finish\n"
    time.sleep(0.7)
    listener.send_signal(signal.SIGINT)
    assert listener.wait(timeout=10) == 130
    assert listener.stderr.read() == "rheo: stopping: rows in flight get 20 s to finish (a second signal stops at once)\n"


def test_a_signal_that_is_sent_twice_counts_once(listener):
    """As `timeout` does: to the process, then to its group."""
    listener.send_signal(signal.SIGTERM)
    assert listener.stdout.readline().startswith("requested")
    listener.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        listener.wait(timeout=1)
    listener.send_signal(signal.SIGTERM)
    assert listener.wait(timeout=10) == 143


START = """
import ctypes, sys
from pipeline.stop import handle_signals

libc = ctypes.CDLL(None)
with handle_signals() as stop:
    print("ready", flush=True)
    for _ in range(int(sys.argv[1]) * 10):
        libc.usleep(100_000)  # in C, as ray.init is for the most part
    stop.ray_has_started()
    print("started", stop.requested, flush=True)
"""


@pytest.mark.parametrize(
    ("start_s", "number", "code", "said", "at_most_s"),
    [
        ("60", signal.SIGTERM, 143, "", 2),
        ("60", signal.SIGINT, 130, "rheo: stopping\n", 3 + 2),
        ("1", signal.SIGINT, 0, "rheo: stopping\n", 3 + 2),  # then it can be closed in order
    ],
)
def test_a_signal_while_ray_starts_waits_for_it_but_not_for_long(start_s, number, code, said, at_most_s):
    command = [sys.executable, "-c", START, start_s]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        sent_at = time.monotonic()
        process.send_signal(number)
        try:
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert time.monotonic() - sent_at < at_most_s
    assert (process.returncode, err) == (code, said)
    assert out == ("" if code else "started True\n")


def test_a_second_interrupt_while_ray_starts_ends_the_process():
    with subprocess.Popen([sys.executable, "-c", START, "60"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"ready\n"
        sent_at = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=20) == 130
        finally:
            process.kill()
    assert time.monotonic() - sent_at < 2.5


KEEP = """
import signal
import pipeline.run
from pipeline.ray_session import ray_session

signal.signal(signal.SIGTERM, lambda number, frame: print("ours", flush=True))
with ray_session(1):
    signal.raise_signal(signal.SIGTERM)
"""


def test_ray_leaves_the_handler_of_sigterm_alone():
    done = subprocess.run([sys.executable, "-c", KEEP], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ours\n"), done.stderr


def test_an_interrupt_waits_for_the_end_of_ray_init_where_nobody_handles_it(monkeypatch):
    """As in a stage of `rheo train-draft`."""
    done = []

    def init(**options):
        signal.raise_signal(signal.SIGINT)
        done.append("init")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("shutdown"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), ray_session_of_a_job(1):
            pytest.fail("it goes on")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["init", "shutdown"]


@pytest.fixture
def short_notice(monkeypatch):
    monkeypatch.setattr("pipeline.stop.GRACE_S", 2.0)


@pytest.fixture
def ledger(ray_session):
    prepare_context(StopCallback)
    return ray.remote(Ledger).options(num_cpus=0).remote()


def read_rows_and_go_on(prompts):
    """A row per prompt; beside them a reader that reads for longer than a stop takes."""

    class Source(ray.data.Datasource):
        def estimate_inmemory_data_size(self):
            return None

        def get_read_tasks(self, parallelism, per_task_row_limit=None, data_context=None):
            return [ray.data.ReadTask(read, ray.data.block.BlockMetadata(None, None, None, None)) for read in (read_all, go_on)]

    def read_all():
        empty = dict.fromkeys(ROW_SCHEMA.names)
        rows = [empty | {"row_index": i, "sample": 0, "id": str(i), "prompt": prompt} for i, prompt in enumerate(prompts)]
        yield pa.Table.from_pylist(rows, schema=ROW_SCHEMA)

    def go_on():
        for _ in range(300):  # not for ever: Ray's cancel may miss a reader, and the next test needs its CPU
            time.sleep(0.1)
            yield from read_all()

    return ray.data.read_datasource(Source(), override_num_blocks=2)


def stream(rows, udf, rows_per_call=8, **arguments):
    """Tables of results, in the form of call that the pipeline uses; rows_per_call=None takes blocks as they are read."""
    if rows_per_call is not None:
        rows = rows.repartition(target_num_rows_per_block=rows_per_call)
    calls = ray.data.ActorPoolStrategy(
        size=1, max_concurrent_calls_per_actor=4, max_tasks_in_flight_per_actor=6, enable_true_multi_threading=True
    )
    options = {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True, "num_cpus": 0, "compute": calls}
    results = rows.map_batches(udf, fn_constructor_kwargs=arguments, **options)
    yield from results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)


def watch(stop, tables, on_table):
    def work():
        for table in tables:
            on_table(table)

    run_watched(work, stop)


def test_readers_in_mid_read_and_rows_that_run_on_do_not_hold_up_a_stop(ledger, short_notice):
    settings = EngineSettings(
        kind="fake", target="fake", draft="auto", revision=None, dtype="auto", device="auto", attention="auto",
        speculation=Speculation(), max_batch=16, max_model_len=None, kv_cache_gib="auto", reproducible=False, seed=0, threads=1,
    )  # fmt: skip
    options = RowOptions(defaults=SamplingParams(), input=InputSection(path="in"), seed=0)
    # a row of every second call runs on, until these calls are all there is: each has seven finished rows then
    rows = read_rows_and_go_on(["a", "b", "[[fake:slow=600]]", *"cdefghijklmno"] * 4)
    seen, asked_at = [], []

    def take(table):
        seen.extend(table["row_index"].to_pylist())
        if not asked_at and len(seen) >= 16:
            asked_at.append(time.monotonic())
            stop.request("enough")

    with handle_signals() as stop, stop.telling(ledger):
        watch(stop, stream(rows, GenerateRows, settings=settings, ledger=ledger, options=options), take)
    assert time.monotonic() - asked_at[0] < 15
    assert stop.reason == "enough"
    assert len(set(seen)) == len(seen)
    assert not any(index % 16 == 2 for index in seen)
    neighbours = {index for index in seen if index % 16 < 8}
    assert neighbours
    assert all({first + i for i in range(8) if i != 2} <= neighbours for first in {16 * (index // 16) for index in neighbours})


def test_a_model_that_is_loading_does_not_hold_up_a_stop(ledger, recwarn):
    class GenerateRowsAfterLoading:
        def __init__(self, ledger):
            ray.get(ledger.start.remote("w"))
            time.sleep(600)

        def __call__(self, table):
            return table

    asked_at = []

    def ask():
        while not ray.get(ledger.read.remote())["num_starts"]:
            time.sleep(0.1)
        asked_at.append(time.monotonic())
        stop.request(signal.SIGINT)

    with handle_signals() as stop, stop.telling(ledger):
        threading.Thread(target=ask).start()
        watch(stop, stream(read_rows_and_go_on("a" * 64), GenerateRowsAfterLoading, ledger=ledger), pytest.fail)
        assert time.monotonic() - asked_at[0] < 15
        assert not stop.is_overdue()
    assert not [warning for warning in recwarn if "number of concurrent actors" in str(warning.message)]


def test_a_reader_that_goes_on_does_not_feed_a_stopped_job(ledger, monkeypatch):
    monkeypatch.setattr(ray.data.DataContext.get_current(), "target_max_block_size", 1)  # every row is seen at once

    class GenerateRowsSlowly:
        def __call__(self, table):
            time.sleep(1)  # the reader is faster
            return table

    asked_at = []

    def take(table):
        if not asked_at:
            asked_at.append(time.monotonic())
            stop.request("enough")

    with handle_signals() as stop, stop.telling(ledger):
        watch(stop, stream(read_rows_and_go_on("a" * 64), GenerateRowsSlowly, rows_per_call=None), take)
    assert time.monotonic() - asked_at[0] < 15


def test_a_worker_that_does_not_answer_is_left_behind(ledger, short_notice):
    class GenerateRowsOrHang:
        def __call__(self, table):
            if table["row_index"][0].as_py() >= 16:
                time.sleep(600)
            return table

    seen = []

    def take(table):
        seen.append(table)
        if not stop.requested:
            stop.request(signal.SIGTERM)

    tables = stream(read_rows_and_go_on("a" * 64), GenerateRowsOrHang)
    with handle_signals() as stop, stop.telling(ledger), pytest.raises(StopOverdue):
        watch(stop, tables, take)
    assert len(seen) == 2
    assert tables.gi_frame is None  # it came to its end, so that Ray can be shut down
