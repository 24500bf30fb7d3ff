"""What is said of machines that have no kernels, and what is kept of those that have."""

import pytest
import torch

from engine.native import build


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path))
    build.load_kernels.cache_clear()
    yield
    build.load_kernels.cache_clear()


def test_another_processor(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert build.why_none() == "the processor has no AVX-512 with bf16"
    assert not build.has_kernels(torch.device("cpu"))


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert build.why_none() == "there is no C++ compiler (c++ or g++; $CXX names another)"


@pytest.mark.parametrize(("compiler", "said"), [("/bin/false", "returned non-zero exit status 1"), ("/nowhere/c++", "No such file")])
def test_a_compiler_that_fails(monkeypatch, compiler, said):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setenv("CXX", compiler)
    assert f"'{compiler}' cannot build them: " in build.why_none()
    assert said in build.why_none()


def test_they_are_built_once(monkeypatch, tmp_path):
    if build.why_none() is not None:
        pytest.skip(f"no compiled kernels: {build.why_none()}")
    (built,) = (tmp_path / "kernels").iterdir()
    before = built.stat().st_mtime_ns
    build.load_kernels.cache_clear()
    assert build.has_kernels(torch.device("cpu")) and not build.has_kernels(torch.device("meta"))
    assert built.stat().st_mtime_ns == before
