"""A job under which Ray dies is not silent, nor is one that has lost its parent, as after `nohup` and a logout."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]

#: leaves the command behind, with its number in a file
LEAVE = """
import subprocess, sys
out, pid, *command = sys.argv[1:]
process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=open(out, "wb"), stderr=subprocess.STDOUT, start_new_session=True)
open(pid, "w").write(str(process.pid))
"""


TOLD, CLOSED_BY_NOBODY = (
    "rheo: engine failure: Ray's own process has died: raylet",
    "rheo: the process was ended before it could close the job",
)


@pytest.mark.parametrize("victim", ["/raylet/raylet ", "ray::DashboardAgent"])  # the raylet ends with its agent
def test_a_job_under_which_ray_dies(tmp_path, victim):
    """It says so, or, where Ray's code has ended it before it saw that, somebody says so in its place."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{n}"}) + "\n" for n in range(20_000)))
    sections = {"input": {"path": str(tmp_path / "prompts.jsonl")}, "engine": {"kind": "fake"}, "output": {"path": str(tmp_path / "out")}}
    (tmp_path / "job.yaml").write_text(json.dumps(sections))
    command = [sys.executable, "-m", "jobs.cli", "run", str(tmp_path / "job.yaml")]
    subprocess.run([sys.executable, "-c", LEAVE, str(tmp_path / "said"), str(tmp_path / "pid"), *command], cwd=ROOT, check=True)
    driver = psutil.Process(int((tmp_path / "pid").read_text()))
    assert driver.ppid() != os.getpid()
    try:
        until = time.monotonic() + 120
        while not any((tmp_path / "out").glob("rows/*.parquet")):
            assert time.monotonic() < until, (tmp_path / "said").read_text()
            time.sleep(0.1)
        (process,) = [each for each in driver.children(recursive=True) if victim in " ".join(each.cmdline())]
        process.kill()
        driver.wait(60)
    finally:
        for process in [*driver.children(recursive=True), driver] if driver.is_running() else ():
            process.kill()
    found = [text for text in (TOLD, CLOSED_BY_NOBODY) if text in (tmp_path / "said").read_text()]
    assert len(found) == 1
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == ("failed" if found == [TOLD] else "running")
