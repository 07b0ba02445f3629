"""What a node offers of the machine that it runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

import kernels
from node.agent import machine
from rigs.agent import config


@pytest.mark.parametrize(("memory_mib", "offered_bytes"), [(0, int(0.9 * (1 << 30))), (700, 700 << 20)])
def test_no_more_is_offered_than_is_free(
    memory_mib: int, offered_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, that is what its limit leaves (tests/node/test_memory_limit.py)."""
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 1 << 30)
    settings = config(tmp_path, {"SWARM_EXPERTS_MEMORY_MIB": str(memory_mib)})
    assert machine.this_machine(settings).memory_bytes == offered_bytes


def test_a_machine_is_as_its_build_says(tmp_path: Path) -> None:
    found = machine.this_machine(config(tmp_path, {"SWARM_EXPERTS_ENABLED": "false", "SWARM_ROUTER_ENABLED": "false"}))
    assert found.build == kernels.build_id()
    assert [one.name for one in found.devices] == [device.name[:63] for device in kernels.devices()]
    assert found.memory_bytes == 0 and not found.can_route
