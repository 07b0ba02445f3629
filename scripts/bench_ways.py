"""The ways to compute the experts that scripts/bench compares, and the llama.cpp programs that run over them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import kernels
from node.commands.local_swarm import LocalNode, LocalSwarmOptions, expert_servers
from node.models.index import ModelIndex
from node.router.programs import EXPERT_TENSOR_PATTERN, read_programs, swarm_backend_path
from node.router.table import RoutingTable


@dataclass
class Way:
    """A way to compute the experts: what a llama.cpp program needs for it."""

    name: str
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


STOCK = Way("stock llama.cpp")


def rpc_way(endpoint: str, name: str = "llama.cpp RPC, 1 server") -> Way:
    """llama.cpp's RPC backend with the experts at HOST:PORT."""
    return Way(name, ["--rpc", endpoint, "-ngl", "0", "-ot", f"{EXPERT_TENSOR_PATTERN}=RPC0[{endpoint}]"])


def swarm_way(table: RoutingTable, path: Path, name: str) -> Way:
    """The Swarm backend with a table, which is written to `path`."""
    path.write_text(table.to_json())
    return Way(
        name,
        ["-ot", f"{EXPERT_TENSOR_PATTERN}=Swarm"],
        {"GGML_BACKEND_PATH": str(swarm_backend_path()), "SWARM_TABLE": str(path)},
    )


def through(table: RoutingTable, port_of: Mapping[int, int]) -> RoutingTable:
    """The table with other ports: those of a relay."""
    nodes = tuple(dataclasses.replace(node, port=port_of[node.port]) for node in table.nodes)
    return dataclasses.replace(table, nodes=nodes)


async def output_of(program: str, arguments: list[str], way: Way) -> str:
    """What the program of llama.cpp prints; SystemExit with the end of its errors when it fails."""
    process = await asyncio.create_subprocess_exec(
        str(kernels.native_path(program)),
        *arguments,
        *way.arguments,
        env={**os.environ, **way.environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise SystemExit(f"bench: {program} with {way.name} failed:\n{errors.decode()[-2000:]}")
    return output.decode()


async def llama_bench(options: argparse.Namespace, model: str, way: Way, *, prompt: int = 0, decode: int = 0) -> float:
    """Tokens a second of one llama-bench run: of a prompt of so many tokens, or of so many tokens generated."""
    arguments = ["-m", model, "-t", str(options.threads), "--poll", "0", "-r", "1", "-o", "json"]
    arguments += ["-p", str(prompt), "-n", str(decode)]
    (result,) = json.loads(await output_of("llama-bench", arguments, way))
    return float(result["avg_ts"])


@contextlib.asynccontextmanager
async def rpc_server(options: argparse.Namespace, log_folder: Path) -> AsyncIterator[int]:
    """llama.cpp's RPC server on loopback; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with (log_folder / "rpc.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(kernels.native_path("ggml-rpc-server")),
            *("-H", "127.0.0.1", "-p", str(port), "-t", str(options.threads)),
            stdout=log,
            stderr=log,
        )
    try:
        for _ in range(100):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            writer.close()
            break
        yield port
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def swarm_nodes(
    index: ModelIndex, servers: int, options: argparse.Namespace, folder: Path
) -> AsyncIterator[tuple[tuple[LocalNode, ...], RoutingTable]]:
    """Expert servers that share every layer, and the table over them."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    programs = await read_programs(index)
    swarm_options = LocalSwarmOptions(nodes=servers, expert_threads=options.threads)
    async with expert_servers(index, programs, swarm_options, log_folder=folder) as found:
        yield found


@contextlib.asynccontextmanager
async def swarm(
    index: ModelIndex, servers: int, options: argparse.Namespace, folder: Path
) -> AsyncIterator[RoutingTable]:
    """As :func:`swarm_nodes`, the table only."""
    async with swarm_nodes(index, servers, options, folder) as (_, table):
        yield table
