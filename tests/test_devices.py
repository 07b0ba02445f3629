"""Which device holds experts, over made-up registries and this build's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

import kernels
from kernels.devices import NoDevice, choose_device


@dataclass(frozen=True)
class Device:
    name: str
    type: str
    computes_ffn: bool = True

    @property
    def description(self) -> str:
        return f"a made-up {self.type}"


CPU = Device("CPU", "cpu")
BLAS = Device("BLAS", "accel", computes_ffn=False)
NPU = Device("NPU0", "accel")
IGPU = Device("Vulkan1", "igpu")
OLD_IGPU = Device("Vulkan2", "igpu", computes_ffn=False)
GPU = Device("CUDA0", "gpu")
GPU1 = Device("CUDA1", "gpu")
OLD_GPU = Device("OpenCL0", "gpu", computes_ffn=False)
OTHER = Device("X", "other")


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        ([CPU], "CPU"),
        ([BLAS, CPU], "CPU"),
        ([CPU, NPU], "NPU0"),
        ([IGPU, CPU], "Vulkan1"),
        ([CPU, IGPU, NPU], "Vulkan1"),
        ([IGPU, GPU, CPU], "CUDA0"),
        ([CPU, GPU1, GPU], "CUDA1"),
        ([OLD_GPU, IGPU, CPU], "Vulkan1"),
        ([OLD_GPU, OLD_IGPU, BLAS, CPU], "CPU"),
        ([OTHER, CPU], "CPU"),
    ],
)
def test_the_best_device_that_can(devices: list[Device], chosen: str) -> None:
    assert choose_device(devices) == chosen


def test_a_named_device() -> None:
    devices = [BLAS, CPU, IGPU, GPU, OTHER]
    for name in ("CPU", "Vulkan1", "CUDA0", "X"):
        assert choose_device(devices, name) == name
    assert choose_device(devices, "cuda0") == "CUDA0"


@pytest.mark.parametrize(
    ("devices", "name", "message"),
    [
        ([BLAS, CPU], "BLAS", "^device BLAS .a made-up accel. cannot compute an expert FFN$"),
        ([BLAS, CPU], "CUDA0", r"^no device named CUDA0; this build has: BLAS \(accel\), CPU \(cpu\)$"),
        ([BLAS, OLD_GPU], "auto", r"^no device of this build can .*; it has: BLAS \(accel\), OpenCL0 \(gpu\)$"),
        ([OTHER], "auto", r"it has: X \(other\)"),
        ([], "auto", "it has: none"),
        ([], "CPU", "no device named CPU; this build has: none"),
    ],
)
def test_no_device(devices: list[Device], name: str, message: str) -> None:
    with pytest.raises(NoDevice, match=message):
        choose_device(devices, name)


def test_the_devices_of_this_machine() -> None:
    devices = {device.name: device for device in kernels.devices()}
    cpu = devices["CPU"]
    assert cpu.type == "cpu"
    assert cpu.computes_ffn
    assert cpu.description
    assert 0 < cpu.memory_free_bytes <= cpu.memory_total_bytes
    assert kernels.choose_device() in devices
    assert kernels.ExpertStore("cpu", 1).device == "CPU"
    with pytest.raises(NoDevice, match=r"no device named CUDA99; this build has: .*CPU"):
        kernels.ExpertStore("CUDA99", 1)


SWARM_SCRIPT = """
import ctypes, json, sys
import kernels

before = [device.name for device in kernels.devices()]
ggml = ctypes.CDLL(str(kernels.native_path("libswarm-ggml.so")))
ggml.ggml_backend_load_all()
ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
base = ctypes.CDLL(str(kernels.native_path("libswarm-ggml-base.so")))
base.ggml_backend_dev_name.restype = ctypes.c_char_p
base.ggml_backend_dev_name.argtypes = [ctypes.c_void_p]
devices = [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]
registered = [base.ggml_backend_dev_name(device).decode() for device in devices]
refusals = []
for name in ("Swarm", "swarm"):
    try:
        kernels.ExpertStore(name, 1)
    except kernels.NoDevice as error:
        refusals.append(str(error))
after = [device.name for device in kernels.devices()]
print(json.dumps([before, registered, after, kernels.choose_device(), refusals]))
"""


def test_remote_experts_are_no_device() -> None:
    """Also when the Swarm backend is loaded, and registered with the ggml that this package uses."""
    backend = kernels.native_path("libggml-swarm.so")
    environment = {**os.environ, "GGML_BACKEND_PATH": str(backend)}
    done = subprocess.run(
        [sys.executable, "-c", SWARM_SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    before, registered, listed, chosen, refusals = json.loads(done.stdout)
    assert "Swarm" in registered
    assert listed == before
    assert "Swarm" not in listed
    assert chosen in before
    assert len(refusals) == 2
    assert refusals[0].startswith("no device named Swarm")
