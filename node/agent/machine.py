"""What this machine offers to a swarm. The only place of the agent that asks the native build and the hardware."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import kernels
from node.memory_limit import MEMORY_SHARE, free_memory_bytes
from node.records import Device
from node.settings.load import Config


@dataclass(frozen=True)
class Machine:
    """A machine as its node's record tells of it.

    ``build``: id of the native build. ``memory_bytes``: what is offered for experts; 0: none. ``can_route``: whether
    the node may route and has llama-server for that.
    """

    build: str
    platform: str
    devices: tuple[Device, ...]
    memory_bytes: int
    can_route: bool


def this_machine(config: Config) -> Machine:
    """The machine that this process runs on. Raises SwarmError when the configured device is not there."""
    return Machine(
        build=kernels.build_id(),
        platform=f"{platform.system()} {platform.machine()}",
        devices=tuple(
            Device(d.name[:63], d.type, d.description[:400], d.memory_total_bytes) for d in kernels.devices()
        ),
        memory_bytes=_offered_memory_bytes(config),
        can_route=_can_route(config),
    )


def _offered_memory_bytes(config: Config) -> int:
    """What the settings say, else a share of what is free now."""
    if not config.experts.enabled:
        return 0
    if config.experts.memory_mib > 0:
        return config.experts.memory_mib << 20
    chosen = kernels.choose_device(config.experts.device)
    device = next(d for d in kernels.devices() if d.name == chosen)
    free = free_memory_bytes() if device.type == "cpu" else device.memory_free_bytes
    return int(free * MEMORY_SHARE)


def _can_route(config: Config) -> bool:
    if not config.router.enabled:
        return False
    try:
        kernels.native_path("llama-server")
    except FileNotFoundError:
        return False
    return True
