"""Compiles the kernels of this folder with the machine's own compiler, once, and loads them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.cache_folder import cache_folder

_FOLDER = Path(__file__).parent
_SOURCES, _HEADERS = (sorted(_FOLDER.glob(pattern)) for pattern in ("*.cpp", "*.h"))
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")

#: of each kernel its arguments: a pointer, an int64, an int or a float
_ARGUMENTS = {
    "rheo_token": "plpplli",
    "rheo_softmax": "plpplli",
    "rheo_add_norm": "ppppllfi",
    "rheo_rotate": "plpppfllli",
    "rheo_silu_mul": "pplli",
    "rheo_store": "plplppllplplii",
    "rheo_attend": "plpppllplplpiiifi",
}
_KINDS = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


class NoKernels(Exception):
    """There are none on this machine; the message says why."""


def load_kernels() -> ctypes.CDLL:
    """The library. Raises NoKernels."""
    library, reason = _load()
    if library is None:
        raise NoKernels(reason)
    return library


def has_kernels(device: torch.device) -> bool:
    """Whether tensors on a device can be given to them."""
    return device.type == "cpu" and why_none() is None


def why_none() -> str | None:
    """Why there are no kernels on this machine, or None where there are."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or why there is none: found out once, so that the answer stays the same."""
    if not (torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()):
        return None, "the processor has no AVX-512 with bf16"
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++")]
    if compiler == [None]:
        return None, "there is no C++ compiler (c++ or g++; $CXX names another)"
    try:
        library = _build(compiler)
    except (OSError, subprocess.CalledProcessError) as error:
        said = [line for line in (getattr(error, "stderr", None) or str(error)).splitlines() if "error" in line.lower()]
        return None, f"'{shlex.join(compiler)}' cannot build them: {said[0] if said else error}"
    for name, kinds in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [_KINDS[kind] for kind in kinds], None
    return library, None


def _build(compiler: Sequence[str]) -> ctypes.CDLL:
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True).stdout.decode(errors="replace")
    named = [version, _describe_processor(), *_FLAGS, *(path.read_text() for path in (*_SOURCES, *_HEADERS))]
    digest = hashlib.sha256("\0".join(named).encode()).hexdigest()[:16]
    try:
        built = cache_folder() / "kernels" / f"{digest}.so"
        with contextlib.suppress(OSError):  # not there yet, or not whole
            return ctypes.CDLL(str(built))
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            os.replace(_compile(compiler, Path(folder)), built)  # other processes may be building it as well
        return ctypes.CDLL(str(built))
    except (OSError, RuntimeError):  # there is no home, or nothing can be written or run there
        with tempfile.TemporaryDirectory() as folder:
            return ctypes.CDLL(str(_compile(compiler, Path(folder))))


def _compile(compiler: Sequence[str], folder: Path) -> Path:
    built = folder / "kernels.so"
    subprocess.run(
        [*compiler, *_FLAGS, "-o", str(built), *map(str, _SOURCES)], check=True, capture_output=True, text=True, errors="replace"
    )
    return built


def _describe_processor() -> str:
    """What `-march=native` depends on: a home folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags"))))
