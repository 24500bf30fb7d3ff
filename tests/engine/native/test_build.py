"""What is said of machines that have no kernels, and what is kept of those that have."""

import tomllib
from pathlib import Path

import pytest
import torch

from engine.native import build
from tests.kernels import needs_kernels


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path))
    build._load.cache_clear()
    yield
    build._load.cache_clear()


def test_another_processor(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert build.why_none() == "the processor has no AVX-512 with bf16"
    assert not build.has_kernels(torch.device("cpu"))


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert build.why_none() == "there is no C++ compiler (c++ or g++; $CXX names another)"


@pytest.mark.parametrize(("compiler", "said"), [("/bin/false", "returned non-zero exit status 1"), ("/nowhere/c++ -O1", "No such file")])
def test_a_compiler_that_fails(monkeypatch, compiler, said):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setenv("CXX", compiler)
    assert f"'{compiler}' cannot build them: " in build.why_none()
    assert said in build.why_none()
    monkeypatch.setattr(build.subprocess, "run", None)  # the answer stays, and costs nothing
    assert said in build.why_none()
    with pytest.raises(build.NoKernels, match="cannot build"):
        build.load_kernels()


@needs_kernels
@pytest.mark.parametrize("cache", ("/proc/nowhere", "~nobody-of-this-name"))
def test_a_cache_that_cannot_be_written(monkeypatch, cache):
    monkeypatch.setenv("RHEO_CACHE", cache)
    assert build.why_none() is None


@needs_kernels
def test_a_file_that_is_not_whole_is_built_again(monkeypatch, tmp_path):
    assert build.why_none() is None
    (whole,) = (tmp_path / "kernels").iterdir()
    broken = tmp_path / "other" / "kernels" / whole.name
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"")
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "other"))
    build._load.cache_clear()
    assert build.why_none() is None
    assert len(broken.read_bytes()) == len(whole.read_bytes())


def test_the_sources_are_in_the_package():
    sections = tomllib.loads((Path(build.__file__).parents[2] / "pyproject.toml").read_text())
    patterns = sections["tool"]["setuptools"]["package-data"]["engine.native"]
    files = [path for path in Path(build.__file__).parent.iterdir() if path.suffix not in (".py", "") and path.is_file()]
    assert files and all(any(path.match(pattern) for pattern in patterns) for path in files)


@needs_kernels
def test_they_are_built_once(tmp_path):
    assert build.why_none() is None
    (built,) = (tmp_path / "kernels").iterdir()
    before = built.stat().st_mtime_ns
    build._load.cache_clear()
    assert build.has_kernels(torch.device("cpu")) and not build.has_kernels(torch.device("meta"))
    assert built.stat().st_mtime_ns == before
