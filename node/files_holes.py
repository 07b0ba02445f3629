"""Gives the blocks of a part of a file back to the file system, which then reads as zeros."""

from __future__ import annotations

import ctypes
import os
import sys

# linux/falloc.h: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_PUNCH_HOLE = 0x01 | 0x02


def punch_hole(descriptor: int, offset: int, count: int) -> None:
    """Frees ``count`` bytes from ``offset`` on; the file keeps its size. Raises OSError, also where the system cannot do it."""
    if not sys.platform.startswith("linux"):
        raise OSError("parts of a file cannot be freed on this system")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if libc.fallocate64(descriptor, _PUNCH_HOLE, offset, count) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
