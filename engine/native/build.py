"""Compiles the kernels of this folder with the machine's own compiler, once, and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from engine.models.gguf import cache_folder

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
    "rheo_store": "plplppllplii",
    "rheo_attend": "plpppllplpiiifi",
}
_KINDS = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


class NoKernels(Exception):
    """There are none on this machine; the message says why."""


@functools.cache
def load_kernels() -> ctypes.CDLL:
    """The library. Raises NoKernels."""
    if not torch.cpu._is_avx512_bf16_supported():
        raise NoKernels("the processor has no AVX-512 with bf16")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise NoKernels("there is no C++ compiler (c++ or g++; $CXX names another)")
    try:
        library = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        said = [line for line in (getattr(error, "stderr", None) or str(error)).splitlines() if "error" in line]
        raise NoKernels(f"'{compiler}' cannot build them: {said[0] if said else error}") from None
    for name, kinds in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [_KINDS[kind] for kind in kinds], None
    return library


def has_kernels(device: torch.device) -> bool:
    """Whether tensors on a device can be given to them."""
    return device.type == "cpu" and why_none() is None


def why_none() -> str | None:
    """Why there are no kernels on this machine, or None where there are."""
    try:
        load_kernels()
    except NoKernels as error:
        return str(error)
    return None


def _build(compiler: str) -> Path:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    named = [version, _describe_processor(), *_FLAGS, *(path.read_text() for path in (*_SOURCES, *_HEADERS))]
    digest = hashlib.sha256("\0".join(named).encode()).hexdigest()[:16]
    built = cache_folder() / "kernels" / f"{digest}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            staged = Path(folder) / built.name
            command = [compiler, *_FLAGS, "-o", str(staged), *map(str, _SOURCES)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            os.replace(staged, built)  # other processes may be building it as well
    return built


def _describe_processor() -> str:
    """What `-march=native` depends on: a home folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags"))))
