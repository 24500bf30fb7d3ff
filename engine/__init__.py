"""rheo's engine: lossless speculative decoding with continuous batching. Runs without Ray.

    from engine import Engine, Request, SamplingParams, Speculation

`Engine` is loaded on first use, so that the data classes can be had without torch.
"""

from engine.errors import EngineError, RowError, UserError
from engine.params import Cycle, Request, Result, SamplingParams, Speculation, Verification

__all__ = [
    "Cycle",
    "Engine",
    "EngineError",
    "Request",
    "Result",
    "RowError",
    "SamplingParams",
    "Speculation",
    "UserError",
    "Verification",
]


def __getattr__(name: str):
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'engine' has no attribute '{name}'")
