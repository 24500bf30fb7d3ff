"""The mark of tests that need the compiled kernels."""

import pytest

from engine.native.build import why_none

needs_kernels = pytest.mark.skipif(why_none() is not None, reason=f"no compiled kernels: {why_none()}")
