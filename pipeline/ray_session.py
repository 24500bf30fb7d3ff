"""A Ray of the command's own, quiet, for as long as it is needed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator

from engine.errors import EngineError
from pipeline.exit_codes import SIGNAL_BASE
from pipeline.quiet import quiet_loggers

# Else ray.init sets a handler of SIGTERM in C++ too, which takes the place of any other and aborts. It is read when ray is imported.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
# Else Ray's C++ ends this process without a word (exit code 1) when the raylet has died and the process's parent is number 1, as after
# `nohup` and a logout: without the raylet's number it takes the parent for the raylet, and 1 for a dead one's heir. With the number of a
# process that lives, this one's, it goes on, and `pipeline.watch` tells what has died. Workers get the raylet's own.
os.environ["RAY_RAYLET_PID"] = str(os.getpid())


@contextlib.contextmanager
def ray_session(num_cores: int) -> Iterator[None]:
    """A Ray of our own, or the one that this process has already."""
    import ray.data  # before the loggers are silenced: its import sets their levels

    quiet_loggers()
    if ray.is_initialized():
        yield
        return
    # With one logical CPU a reader could block the others for ever; engines ask for none.
    options = {"num_cpus": max(2, num_cores), "include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with _without_sigterm_handler(), _held_sigint():
            try:
                ray.init(address="local", **options)
            except Exception as error:  # a plain Exception when a busy machine takes longer than Ray waits
                raise EngineError(f"Ray cannot be started: {error}") from None
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _without_sigterm_handler() -> Iterator[None]:
    """Keeps ray.init from setting its handler of SIGTERM, which raises SystemExit(15) wherever the process is: in C++, which aborts, or in
    the middle of logging, whose lock then is never free again. Without it SIGTERM does what it did before.
    """
    import ray

    utils = ray._private.utils
    if not hasattr(utils, "set_sigterm_handler"):
        raise EngineError(f"ray {ray.__version__} has no utils.set_sigterm_handler; allowed: ray>=2.60,<2.61")
    before = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before


@contextlib.contextmanager
def _held_sigint() -> Iterator[None]:
    """Has Ctrl-C wait for the end of ray.init, and a second one end the process: a KeyboardInterrupt in the middle of it leaves a Ray that
    crashes when the process ends, or hangs. Does nothing where somebody handles SIGINT already (see `pipeline.stop.handle_signals`).
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(SIGNAL_BASE + number) if held else held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if held:
            raise KeyboardInterrupt
