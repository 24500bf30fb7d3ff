"""Kills of jobs at random moments, each followed by a restart at once: no row lost, none twice, all as in an undisturbed run.

    python -m jobs.chaos.run fake --kills 100 --seed 1
    python -m jobs.chaos.run s3 --kills 40 --seed 1

Modes: fake and real (engine, on a disk), s3, cpus2 (a Ray of two CPUs that the program has started) and cluster (of three nodes). Every
job is added to jobs/results/chaos/MODE.json and MODE.log when it is over; a run that is started again goes on until there are --kills
in all. Files of jobs with findings stay in the folder that is named at the start (TMPDIR says where that is).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from jobs.chaos.job import SCENARIOS, ChaosJob
from jobs.chaos.modes import MODES
from jobs.chaos.results import Results, describe

_KILLS_OF_A_JOB = 10
_WEIGHTS = (3, 1, 1)  # of the scenarios
_WANTED_IN_WRITES = 0.4
_BOOT_S = 8.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    sys.setswitchinterval(0.0005)  # a thread that kills may not wait for one that looks
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{args.mode}-"))
    os.environ["RAY_TMPDIR"] = str(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    results, references, boot_s, num_findings = Results(args.mode), {}, _BOOT_S, 0
    print(f"{args.mode}: {results.num_kills} kills in {results.num_jobs} jobs so far; files in {folder}", flush=True)
    with MODES[args.mode](folder) as mode:
        while results.num_kills < args.kills:
            number, began_at = results.num_jobs, time.monotonic()
            rng = random.Random(f"{args.seed} {args.mode} {number}")
            job = ChaosJob(
                mode,
                number,
                rng,
                folder / f"job{number}",
                scenario=rng.choices(SCENARIOS, _WEIGHTS)[0],
                references=references,
                boot_s=boot_s,
                max_kills=_KILLS_OF_A_JOB,
                more_writes=results.share_in_writes < _WANTED_IN_WRITES,
            )
            report = job.run()
            boot_s = job.boot_s
            results.add(report, args.seed, time.monotonic() - began_at)
            print("\n".join(describe(report)), flush=True)
            is_bad = bool(report.findings) or report.verdict is None or not report.verdict.is_good
            num_findings += is_bad
            if not is_bad:
                shutil.rmtree(folder / f"job{number}")
            for session in (folder / "ray").glob("session_*"):
                if not session.is_symlink() and time.time() - session.stat().st_mtime > 600:
                    shutil.rmtree(session, ignore_errors=True)
    print(f"{args.mode}: {results.num_kills} kills, {results.share_in_writes:.0%} in writes; jobs with findings: {num_findings}; {folder}")
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
