"""`rheo` in a process that has a Ray already, as a program of the user's has.

python -m jobs.chaos.driver --num-cpus 2 run JOB.yaml
python -m jobs.chaos.driver --address 127.0.0.1:6379 run JOB.yaml
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys

from pipeline.exit_codes import SIGNAL_BASE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-cpus", type=int)
    parser.add_argument("--address", default="local")
    args, rest = parser.parse_known_args()
    import ray

    options = {} if args.num_cpus is None else {"num_cpus": args.num_cpus, "include_dashboard": False}
    try:
        ray.init(address=args.address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except SystemExit:  # Ray's own handler of SIGTERM
        sys.exit(SIGNAL_BASE + signal.SIGTERM)
    from pipeline.cli import main as rheo

    sys.argv = ["rheo", *rest]
    rheo()


if __name__ == "__main__":
    main()
