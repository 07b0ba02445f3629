"""Expert FFNs on ggml devices, and the native programs of this build.

`native` has what needs the extension, which is loaded when the first such name is asked for: the NumPy `reference`, the
comparison of backends (`equivalence`, `tolerances`) and `cpu_quota` import without a build. The extension,
``libggml-swarm.so``, ``llama-server`` and the ggml libraries come from one source and one build. Knows neither `node`
nor `gossip`; the C++ is in ``kernels/src``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kernels.cpu_quota import cpu_quota, default_threads
from kernels.errors import BuildMismatch

if TYPE_CHECKING:
    from kernels._kernels import (
        BadCall,
        CallConnection,
        CallServer,
        ComputeError,
        Device,
        LoadError,
        NotFinite,
        NotHeld,
        Program,
        ProgramError,
        ProgramMismatch,
        SliceInfo,
        TensorParts,
    )
    from kernels.device_choice import NoDevice
    from kernels.expert_reference import TensorSource, expert_rows
    from kernels.native import ExpertStore, build_id, choose_device, devices, native_path

__all__ = [
    "BadCall",
    "BuildMismatch",
    "CallConnection",
    "CallServer",
    "ComputeError",
    "Device",
    "ExpertStore",
    "LoadError",
    "NoDevice",
    "NotFinite",
    "NotHeld",
    "Program",
    "ProgramError",
    "ProgramMismatch",
    "SliceInfo",
    "TensorParts",
    "TensorSource",
    "build_id",
    "choose_device",
    "cpu_quota",
    "default_threads",
    "devices",
    "expert_rows",
    "native_path",
]

_ERRORS = ("BadCall", "ComputeError", "LoadError", "NotFinite", "NotHeld", "ProgramError", "ProgramMismatch")
_EXTENSION = ("CallConnection", "CallServer", "Device", "Program", "SliceInfo", "TensorParts", *_ERRORS)
_LAZY = {
    **dict.fromkeys(_EXTENSION, "kernels._kernels"),
    **dict.fromkeys(("ExpertStore", "build_id", "choose_device", "devices", "native_path"), "kernels.native"),
    **dict.fromkeys(("TensorSource", "expert_rows"), "kernels.expert_reference"),
    "NoDevice": "kernels.device_choice",
}


def __getattr__(name: str) -> Any:
    """PEP 562. Raises ImportError without a build, BuildMismatch when another ggml took the place of this build's."""
    if name == "_kernels":
        # Not as another submodule: `native` says how its libraries are looked up, before it is loaded.
        return import_module("kernels.native")._kernels
    if name not in _LAZY:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    if _LAZY[name] == "kernels._kernels":
        import_module("kernels.native")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
