"""The three kinds of error. Importing this module loads no torch, so every layer can name them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What the user asked for cannot be done; raised before any model is loaded, and ends the run (exit code 2)."""


class RowError(Exception):
    """One row cannot be generated; the others go on. It becomes an error row.

    Args:
        type: the short name that lands in the column `error_type`, e.g. `prompt_too_long`.
        message: what was wrong, with the value and what is allowed (column `error_message`).
        num_prompt_tokens: of the row's prompt, where they were counted.
    """

    def __init__(self, type: str, message: str, num_prompt_tokens: int = 0):
        super().__init__(type, message, num_prompt_tokens)  # all of them, so that the error survives pickling
        self.type = type
        self.message = message
        self.num_prompt_tokens = num_prompt_tokens

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


class EngineError(Exception):
    """The engine itself failed (out of memory, a broken device); its rows can be tried again by another one."""


def unknown_name(what: str, name: object, allowed: Iterable[str]) -> str:
    """The sentence for a name that is not one of `allowed`: the value, the nearest valid name, and all that is allowed.

    >>> unknown_name("method", "reho", ["rheo", "topk"])
    "unknown method 'reho'; did you mean 'rheo'? (allowed: rheo, topk)"
    """
    names = list(allowed)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"unknown {what} '{name}'{hint} (allowed: {', '.join(names)})"
