"""Errors of the kernels package. All but BuildMismatch are the extension's own; `kernels` has them all.

::

    ValueError    ProgramError     a layer program is malformed
    ValueError    BadCall          shapes, ids or values of a call are wrong; nothing was computed
    ValueError    ProgramMismatch  the call names another layer program than the one loaded
    LookupError   NotHeld          the layer or an expert of the call is not held
    RuntimeError  LoadError        a slice cannot be loaded
    RuntimeError  ComputeError     the device failed; NotFinite, its subclass: a result is not finite
    RuntimeError  BuildMismatch    parts of different builds met in one process
"""


class BuildMismatch(RuntimeError):
    """Native parts of different builds met in one process; the message names both files."""
