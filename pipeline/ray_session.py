"""A Ray of the command's own, quiet, for as long as it is needed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from engine.errors import EngineError
from pipeline.quiet import quiet_loggers


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
    with _without_sigterm_handler():
        try:
            ray.init(address="local", **options)
        except Exception as error:  # a plain Exception when a busy machine takes longer than Ray waits
            raise EngineError(f"Ray cannot be started: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _without_sigterm_handler() -> Iterator[None]:
    """Keeps ray.init from setting its handler of SIGTERM, which raises SystemExit(15) wherever the process is: in C++, which aborts, or
    in the middle of logging, whose lock then is never free again. Without it SIGTERM ends the process at once, until we handle it.
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
