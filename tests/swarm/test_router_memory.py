"""The router holds no experts."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import psutil

from node.commands.local_swarm import LocalSwarmOptions, local_swarm
from node.models.index import read_model
from node.router.llama_server import EngineOptions
from node.router.programs import read_programs
from rigs import random_models

EXPERT_BYTES = 1 << 30
ALLOWANCE_BYTES = 100 << 20


async def test_router_memory_with_a_gigabyte_of_experts(tmp_path: Path) -> None:
    model = random_models.big_model(EXPERT_BYTES)
    index = read_model(model)
    assert sum(index.expert_bytes(layer) for layer in index.expert_layers) >= EXPERT_BYTES
    programs = await read_programs(index)
    options = LocalSwarmOptions(nodes=2, engine=EngineOptions(context=2048, extra=("--log-verbosity", "4")))
    async with (
        local_swarm(index, programs, options, log_folder=tmp_path) as swarm,
        aiohttp.ClientSession(headers=swarm.engine.headers) as session,
    ):
        for number in range(50):
            body = {"prompt": f"{number} " + "lorem ipsum dolor " * (number % 7 + 1), "n_predict": 2, "seed": number}
            async with session.post(f"{swarm.engine.url}/completion", json=body) as response:
                assert response.status == 200, await response.text()
        process = psutil.Process(swarm.engine.process.pid)
        resident, read = process.memory_info().rss, process.io_counters().read_chars
        peak = _peak_bytes(process.pid)
        await asyncio.sleep(0)
    log = (tmp_path / "router.log").read_text()
    buffers = {
        kind: sum(float(mib) for mib in re.findall(rf"(?m)(?!.*Swarm).*{kind} buffer size *= *([\d.]+) MiB", log))
        for kind in ("KV", "compute", "output")
    }
    assert buffers["compute"] > 0 and buffers["KV"] > 0, log[-3000:]
    allowed = index.trunk_bytes + int((buffers["KV"] + buffers["compute"]) * 2**20) + ALLOWANCE_BYTES
    print(
        f"resident {resident / 2**20:.0f} MiB; allowed {allowed / 2**20:.0f} MiB: trunk "
        f"{index.trunk_bytes / 2**20:.0f}, buffers {buffers}"
    )
    assert resident <= allowed
    # The experts are neither read nor mapped: the trunk is copied out of a mapping.
    print(f"peak {peak / 2**20:.0f} MiB; {read / 2**20:.0f} MiB read by calls")
    assert peak <= allowed + index.trunk_bytes
    assert read <= ALLOWANCE_BYTES


def _peak_bytes(pid: int) -> int:
    (line,) = re.findall(r"(?m)^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text())
    return int(line) * 1024
