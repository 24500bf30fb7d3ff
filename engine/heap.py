"""The C library's heap. By default glibc gives a freed block of some MiB back to the system at once, and the next pass, which wants a block
of the same size for its logits, has every page of it found and cleared anew: that took about a twelfth of a plain pass at batch 64.
"""

from __future__ import annotations

import ctypes
import functools

#: parameters of mallopt (glibc's malloc.h)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8

_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc takes no larger one
_NEVER = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Let the process keep freed blocks of up to 32 MiB for its next ones. Whether the C library can: others than glibc have no such
    setting, and work as before."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One arena, as what the system is asked for beyond the first one cannot be kept
    return all([mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), mallopt(_TRIM_THRESHOLD, _NEVER), mallopt(_ARENA_MAX, 1)])
