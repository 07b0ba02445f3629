"""Which device holds experts, over made-up registries and this build's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

import kernels
from kernels.device_choice import NoDevice, choose_device, is_software, usable_devices


@dataclass(frozen=True)
class Device:
    name: str
    type: str
    computes_ffn: bool = True
    backend: str = "Made"
    chip: str = ""
    memory_total_bytes: int = 8 << 30
    said: str = ""

    @property
    def description(self) -> str:
        return self.said or f"a made-up {self.type}"


CPU = Device("CPU", "cpu")
BLAS = Device("BLAS", "accel", computes_ffn=False)
NPU = Device("NPU0", "accel")
IGPU = Device("Vulkan1", "igpu")
OLD_IGPU = Device("Vulkan2", "igpu", computes_ffn=False)
GPU = Device("CUDA0", "gpu")
GPU1 = Device("CUDA1", "gpu")
OLD_GPU = Device("OpenCL0", "gpu", computes_ffn=False)
OTHER = Device("X", "other")
BIG_GPU = Device("CUDA2", "gpu", memory_total_bytes=24 << 30)
BIG_IGPU = Device("Vulkan3", "igpu", memory_total_bytes=120 << 30)
LLVMPIPE = Device(
    "Vulkan0", "gpu", backend="Vulkan", said="llvmpipe (LLVM 15.0.6, 256 bits)", memory_total_bytes=64 << 30
)
SWIFTSHADER = Device("Vulkan0", "gpu", backend="Vulkan", said="SwiftShader Device (LLVM 10.0.0)")
POCL = Device("GPUOpenCL", "gpu", backend="OpenCL", said="cpu-haswell-AMD EPYC, Portable Computing Language")
REMOTE = Device("RPC0", "gpu", backend="RPC", said="192.168.1.7:50052", memory_total_bytes=48 << 30)
# One chip through two backends; ggml spells PCI addresses in lower case, drivers do not all.
CUDA_CHIP = Device("CUDA0", "gpu", backend="CUDA", chip="0000:c1:00.0")
VULKAN_CHIP = Device("Vulkan0", "gpu", backend="Vulkan", chip="0000:C1:00.0", memory_total_bytes=9 << 30)
VULKAN_OTHER_CHIP = Device("Vulkan1", "gpu", backend="Vulkan", chip="0000:41:00.0")
# As seen: an integrated GPU that calls itself an accelerator under its maker's backend, and igpu under Vulkan.
GB10_ACCEL = Device("CUDA0", "accel", backend="CUDA", chip="000f:01:00.0")
GB10_VULKAN = Device("Vulkan0", "igpu", backend="Vulkan", chip="000f:01:00.0")
OLD_CUDA_CHIP = Device("CUDA0", "gpu", False, backend="CUDA", chip="0000:c1:00.0")


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
        ([NPU, CPU], "NPU0"),
        ([GPU, BIG_GPU, GPU1, CPU], "CUDA2"),
        ([BIG_IGPU, GPU, CPU], "CUDA0"),
        ([IGPU, BIG_IGPU, CPU], "Vulkan3"),
        ([LLVMPIPE, CPU], "CPU"),
        ([SWIFTSHADER, POCL, CPU], "CPU"),
        ([LLVMPIPE, IGPU, CPU], "Vulkan1"),
        ([REMOTE, IGPU, CPU], "Vulkan1"),
        ([REMOTE, CPU], "CPU"),
        ([VULKAN_CHIP, CUDA_CHIP, CPU], "CUDA0"),
        ([CUDA_CHIP, VULKAN_CHIP, CPU], "CUDA0"),
        ([OLD_CUDA_CHIP, VULKAN_CHIP, CPU], "Vulkan0"),
        ([GB10_VULKAN, GB10_ACCEL, CPU], "CUDA0"),
        ([GB10_ACCEL, BLAS, CPU], "CUDA0"),
    ],
)
def test_the_best_device_that_can(devices: list[Device], chosen: str) -> None:
    assert choose_device(devices) == chosen


def test_each_chip_once_and_the_best_first() -> None:
    devices = [CPU, VULKAN_OTHER_CHIP, VULKAN_CHIP, LLVMPIPE, CUDA_CHIP, REMOTE, BLAS, IGPU]
    assert [device.name for device in usable_devices(devices)] == ["Vulkan1", "CUDA0", "Vulkan1", "CPU"]
    assert usable_devices(devices)[0] is VULKAN_OTHER_CHIP and usable_devices(devices)[2] is IGPU
    # Two devices without an address may be two chips.
    assert [device.name for device in usable_devices([GPU, GPU1])] == ["CUDA0", "CUDA1"]


def test_software_that_passes_for_a_gpu_is_used_when_it_is_named() -> None:
    assert choose_device([LLVMPIPE, CPU], "Vulkan0") == "Vulkan0"
    assert is_software(LLVMPIPE) and is_software(POCL)
    # A CPU may well be named so by those who make it.
    assert not is_software(Device("CPU", "cpu", said="llvmpipe")) and not is_software(CUDA_CHIP)
    with pytest.raises(NoDevice, match="Vulkan0 is software that passes for a GPU, and is used only when named"):
        choose_device([LLVMPIPE])


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
    assert cpu.description and cpu.backend == "CPU" and cpu.chip == ""
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
