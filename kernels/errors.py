"""Errors of the kernels package.

::

    ValueError    ProgramError     a layer program is malformed
    ValueError    BadCall          shapes, ids or values of a call are wrong; nothing was computed
    ValueError    ProgramMismatch  the call names another layer program than the one loaded
    LookupError   NotHeld          the layer or an expert of the call is not held
    RuntimeError  LoadError        a slice cannot be loaded
    RuntimeError  ComputeError     the device failed; NotFinite, its subclass: a result is not finite
    RuntimeError  BuildMismatch    parts of different builds met in one process
"""

from kernels._kernels import BadCall, ComputeError, LoadError, NotFinite, NotHeld, ProgramError, ProgramMismatch

__all__ = [
    "BadCall",
    "BuildMismatch",
    "ComputeError",
    "LoadError",
    "NotFinite",
    "NotHeld",
    "ProgramError",
    "ProgramMismatch",
]


class BuildMismatch(RuntimeError):
    """Native parts of different builds met in one process; the message names both files."""
