"""The extension and the native programs of this build, and the check that no other ggml took their place."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def _import_extension() -> None:
    # Symbols of this build's libraries are looked up in them first: another package's ggml, loaded before with global
    # visibility, would otherwise answer for ours. glibc only; macOS has two-level names by itself.
    deepbind = getattr(os, "RTLD_DEEPBIND", 0)
    before = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL | deepbind)
    try:
        import kernels._kernels  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "kernels._kernels":
            raise
        raise ImportError("swarm-node's native code is not built here: scripts/run or pip install builds it") from error
    finally:
        sys.setdlopenflags(before)


_import_extension()

from kernels import _kernels  # noqa: E402
from kernels._kernels import Device  # noqa: E402
from kernels.cpu_quota import default_threads  # noqa: E402
from kernels.device_choice import choose_device as _choose_device  # noqa: E402
from kernels.errors import BuildMismatch  # noqa: E402


def build_id() -> str:
    """The id compiled into every native part of this build."""
    return str(_kernels.build_id)


def native_path(name: str) -> Path:
    """The path of a native program or library of this build, such as ``llama-server``.

    Raises FileNotFoundError when this build has none of that name (an expert-only build, or one without tools).
    """
    path = _NATIVE / name
    if not path.exists():
        raise FileNotFoundError(
            f"this build of swarm-node has no {name} ({path}); the router's programs are left out by "
            f"SWARM_ROUTER=OFF, llama.cpp's tools are built with CMAKE_ARGS=-DSWARM_TOOLS=ON"
        )
    return path


def devices() -> list[Device]:
    """The ggml devices of this build on this machine, without the Swarm backend's own."""
    return list(_kernels.devices())


def choose_device(name: str = "auto") -> str:
    """The name of the device to hold experts on: ``name`` itself, or the best one that computes an expert FFN."""
    return _choose_device(devices(), name)


class ExpertStore(_kernels.ExpertStore):
    """Expert slices of one model on one device, and the layer programs computed on them.

    ``device``: a ggml device's name or ``auto``. ``threads``: of a CPU device; 0 takes what the CPU quota allows.
    """

    def __init__(self, device: str = "auto", threads: int = 0) -> None:
        super().__init__(choose_device(device), threads if threads > 0 else default_threads())


def _check_build() -> Path:
    native = Path(str(_kernels.__file__)).parent / "_native"
    loaded = Path(_kernels.ggml_library_path())
    commit = _kernels.ggml_commit()
    expected = f"swarm-{_kernels.build_id}"
    if commit != expected:
        raise BuildMismatch(
            f"two builds met in one process: {_kernels.__file__} is of build {expected}, but the ggml it got is "
            f"{loaded} of build {commit}. Remove that library from LD_PRELOAD and LD_LIBRARY_PATH, or reinstall "
            f"swarm-node"
        )
    return native


_NATIVE = _check_build()
