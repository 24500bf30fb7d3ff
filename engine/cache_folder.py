"""Where rheo keeps what it has made once for this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """For converted models and compiled kernels: $RHEO_CACHE, else $XDG_CACHE_HOME/rheo, else ~/.cache/rheo."""
    if os.environ.get("RHEO_CACHE"):
        return Path(os.environ["RHEO_CACHE"]).expanduser()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "rheo"
    return Path.home() / ".cache" / "rheo"
