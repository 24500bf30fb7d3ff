"""Tests of the compiled kernels, which need a processor with AVX-512 and bf16 and a C++ compiler."""

import pytest

from engine.native.build import why_none


@pytest.fixture(autouse=True)
def _needs_kernels(request):
    if request.module.__name__.rpartition(".")[2] != "test_build" and why_none() is not None:
        pytest.skip(f"no compiled kernels: {why_none()}")
