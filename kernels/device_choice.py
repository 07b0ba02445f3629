"""Which ggml device holds the experts of this machine."""

from collections.abc import Sequence
from typing import Protocol


class DeviceLike(Protocol):
    """What the choice looks at; ``kernels.devices()`` gives the real ones.

    ``chip``: what tells one piece of hardware from another whatever the backend, a PCI address; empty where that is
    not known.
    """

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def chip(self) -> str: ...
    @property
    def memory_total_bytes(self) -> int: ...
    @property
    def computes_ffn(self) -> bool: ...


# A discrete GPU before one that shares the memory, and the CPU before nothing. An accelerator is taken exactly if it
# can compute an expert: BLAS reports itself as one and cannot, an integrated GPU was seen that did and could.
_PREFERENCE = ("gpu", "igpu", "accel", "cpu")

# For one chip that two backends offer: the maker's own before those that serve every make.
_GENERAL_BACKENDS = ("vulkan", "opencl", "webgpu")

# CPUs that pass for GPUs, by what Vulkan and OpenCL call them. ggml's own CPU code is several times faster.
_SOFTWARE = (
    "llvmpipe",
    "lavapipe",
    "swiftshader",
    "software rasterizer",
    "basic render driver",
    "pocl",
    "portable computing language",
)


class NoDevice(RuntimeError):
    """No device of this build can hold experts, or the one asked for cannot."""


def is_software(device: DeviceLike) -> bool:
    """Whether a device is a GPU in name only."""
    said = f"{device.name} {device.description}".lower()
    return device.type != "cpu" and any(name in said for name in _SOFTWARE)


def usable_devices(devices: Sequence[DeviceLike]) -> list[DeviceLike]:
    """The devices that can hold experts, the best first, and each chip once.

    A GPU before one that shares the machine's memory, before an accelerator, before the CPU; of several of a kind,
    the one with the most memory, then the one listed first. Left out are what cannot compute an expert, software that
    passes for a GPU, and other machines (ggml's RPC): they have nodes of their own.
    """
    able = [
        device
        for device in devices
        if device.computes_ffn
        and device.type in _PREFERENCE
        and device.backend.lower() != "rpc"
        and not is_software(device)
    ]
    # sorted() keeps the order of what is equal.
    by_maker = sorted(able, key=lambda device: device.backend.lower() in _GENERAL_BACKENDS)
    chips: set[str] = set()
    single: list[DeviceLike] = []
    for device in by_maker:
        chip = device.chip.lower()
        if not chip or chip not in chips:
            single.append(device)
            chips.add(chip)
    places = {id(device): place for place, device in enumerate(devices)}
    return sorted(
        single,
        key=lambda d: (_PREFERENCE.index(d.type), -d.memory_total_bytes if d.type != "cpu" else 0, places[id(d)]),
    )


def choose_device(devices: Sequence[DeviceLike], name: str = "auto") -> str:
    """The name of the device to hold experts on.

    ``name``: a device's name, which must then be able to compute an expert, or ``auto`` for the first of
    ``usable_devices``. Raises NoDevice.
    """
    known = ", ".join(f"{d.name} ({d.type})" for d in devices) or "none"
    if name != "auto":
        for device in devices:
            if device.name.lower() == name.lower():
                if not device.computes_ffn:
                    raise NoDevice(f"device {device.name} ({device.description}) cannot compute an expert FFN")
                return device.name
        raise NoDevice(f"no device named {name}; this build has: {known}")
    usable = usable_devices(devices)
    if not usable:
        software = [device.name for device in devices if device.computes_ffn and is_software(device)]
        hint = (
            f"; {', '.join(software)} is software that passes for a GPU, and is used only when named"
            if software
            else ""
        )
        raise NoDevice(f"no device of this build can compute an expert FFN; it has: {known}{hint}")
    return usable[0].name
