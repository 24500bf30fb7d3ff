import os
import random
import tempfile
import tracemalloc

import pytest

from engine.errors import UserError
from pipeline import repeated_ids
from pipeline.repeated_ids import IdHashes


def find(ids):
    with IdHashes() as hashes:
        for id in ids:
            hashes.add(id)
        return hashes.find_suspects()


def find_slowly(ids, most):
    """The records of the first `most` repeats, with the first of each id."""
    firsts, repeats = {}, []
    for index, id in enumerate(ids):
        if firsts.setdefault(id, index) != index and len(repeats) < 2 * most:
            repeats += [firsts[id], index]
    return set(repeats)


@pytest.mark.parametrize("run_ids", [1, 3, 16, 100, 10_000])
@pytest.mark.parametrize("num_kinds", [1, 20, 2000, 100_000])
def test_the_first_repeats_and_what_they_repeat_are_found(monkeypatch, run_ids, num_kinds):
    monkeypatch.setattr(repeated_ids, "_RUN_IDS", run_ids)
    monkeypatch.setattr(repeated_ids, "_KEEP_PAIRS", 8)
    values = random.Random(run_ids)
    ids = [f"id-{values.randrange(num_kinds)}" for _ in range(1000)]
    suspects = find(ids)
    assert suspects == sorted(set(suspects))
    assert find_slowly(ids, 8) <= set(suspects)
    assert len(suspects) <= 16
    repeats = {id for id in ids if ids.count(id) > 1}
    assert all(ids[index] in repeats for index in suspects)


@pytest.mark.parametrize("num_ids", [0, 1, 15, 16, 17, 500])
def test_ids_that_differ_are_no_suspects(monkeypatch, num_ids):
    monkeypatch.setattr(repeated_ids, "_RUN_IDS", 16)
    assert find([f"id-{i}" for i in range(num_ids)]) == []


def test_a_repeat_is_found_wherever_the_two_are(monkeypatch):
    monkeypatch.setattr(repeated_ids, "_RUN_IDS", 4)
    for first in range(12):
        for second in range(first + 1, 13):
            ids = [str(i) for i in range(13)]
            ids[second] = ids[first]
            assert find(ids) == [first, second]


def test_the_file_has_no_name_and_is_closed_by_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(repeated_ids, "_RUN_IDS", 4)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt), IdHashes() as hashes:
        for i in range(100):
            hashes.add(str(i))
        assert len(os.listdir("/proc/self/fd")) == num_open + 1
        assert os.listdir(tmp_path) == []
        raise KeyboardInterrupt
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_folder_that_takes_no_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.setattr(repeated_ids, "_RUN_IDS", 4)
    with pytest.raises(UserError, match=r"temporary file for the ids' hashes.*No such file or directory; TMPDIR"):
        find([str(i) for i in range(4)])


@pytest.mark.parametrize("run_ids", [64, 4096])
def test_a_full_disk_is_said(monkeypatch, run_ids):
    monkeypatch.setattr(repeated_ids, "_RUN_IDS", run_ids)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "w+b"))  # noqa: SIM115
    with pytest.raises(UserError, match=r"temporary file for the ids' hashes.*No space left on device; TMPDIR"):
        find([str(i) for i in range(run_ids)])


@pytest.mark.parametrize("num_kinds", [1, 1 << 60])
def test_memory_does_not_grow_with_the_number_of_ids(monkeypatch, num_kinds):
    monkeypatch.setattr(repeated_ids, "_RUN_IDS", 4096)
    peaks = []
    for num_ids in (40_000, 200_000):
        tracemalloc.start()
        find(str(i % num_kinds) for i in range(num_ids))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 3 * 160_000  # bytes; in memory they would take 8 each, and as much again to be sorted
