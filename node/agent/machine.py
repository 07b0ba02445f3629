"""What this machine offers to a swarm."""

from __future__ import annotations

import kernels
from node.memory_limit import MEMORY_SHARE, free_memory_bytes
from node.records import Device
from node.settings.load import Config


def devices() -> tuple[Device, ...]:
    """Its devices, as the record tells of them."""
    return tuple(Device(d.name[:63], d.type, d.description[:400], d.memory_total_bytes) for d in kernels.devices())


def offered_memory_bytes(config: Config) -> int:
    """For experts: as configured, else a share of what is free now; 0: none."""
    if not config.experts.enabled:
        return 0
    if config.experts.memory_mib > 0:
        return config.experts.memory_mib << 20
    chosen = kernels.choose_device(config.experts.device)
    device = next(d for d in kernels.devices() if d.name == chosen)
    free = free_memory_bytes() if device.type == "cpu" else device.memory_free_bytes
    return int(free * MEMORY_SHARE)


def can_run_router(config: Config) -> bool:
    """Whether it may route, and has llama.cpp for that."""
    if not config.router.enabled:
        return False
    try:
        kernels.native_path("llama-server")
    except FileNotFoundError:
        return False
    return True
