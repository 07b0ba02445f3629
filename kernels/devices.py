"""Which ggml device holds the experts of this machine."""

from collections.abc import Sequence
from typing import Protocol


class DeviceLike(Protocol):
    """What the choice looks at; ``kernels.devices()`` gives the real ones."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def computes_ffn(self) -> bool: ...


# A discrete GPU before one that shares the memory, and the CPU before nothing. An accelerator is taken exactly if it
# can compute an expert: BLAS reports itself as one and cannot, an integrated GPU was seen that did and could.
_PREFERENCE = ("gpu", "igpu", "accel", "cpu")


class NoDevice(RuntimeError):
    """No device of this build can hold experts, or the one asked for cannot."""


def choose_device(devices: Sequence[DeviceLike], name: str = "auto") -> str:
    """The name of the device to hold experts on.

    ``name``: a device's name, which must then be able to compute an expert, or ``auto``. Raises NoDevice.
    """
    known = ", ".join(f"{d.name} ({d.type})" for d in devices) or "none"
    if name != "auto":
        for device in devices:
            if device.name.lower() == name.lower():
                if not device.computes_ffn:
                    raise NoDevice(f"device {device.name} ({device.description}) cannot compute an expert FFN")
                return device.name
        raise NoDevice(f"no device named {name}; this build has: {known}")
    able = [d for d in devices if d.computes_ffn and d.type in _PREFERENCE]
    if not able:
        raise NoDevice(f"no device of this build can compute an expert FFN; it has: {known}")
    return min(able, key=lambda d: _PREFERENCE.index(d.type)).name
